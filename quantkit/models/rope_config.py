"""Rotary position embedding as ``config.json`` describes it, in both of transformers' spellings.

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one table ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quantkit.models.reader import ConfigReader

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
"""What every family may ask for; ``longrope`` is for those that say so."""
DYNAMIC = "dynamic"
"""A kind that stretches the rope in sequences longer than ``max_position_embeddings``, which none is here."""
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding, https://arxiv.org/abs/2104.09864.

    Attributes:
        theta: base of the wavelengths.
        kind: ``default``; ``linear`` (positions divided by ``factor``); ``llama3`` (long wavelengths
            divided, short ones kept, a ramp between); ``yarn``, https://arxiv.org/abs/2309.00071;
            ``longrope``, https://arxiv.org/abs/2402.13753.
        factor: by how much the context is stretched.
        original_max_positions: the context it was trained with (all but ``linear``).
        low_freq_factor, high_freq_factor: ends of llama3's ramp, in wavelengths per trained context.
        beta_fast, beta_slow: ends of yarn's ramp, in rotations per trained context.
        truncate: yarn's ramp starts and ends at whole dimensions.
        attention_factor: cos and sin are multiplied by it.
        short_factors, long_factors: longrope's, one a pair of dimensions: each wavelength is multiplied by
            one of the first in sequences that end within the trained context, of the second in longer ones.
        partial: the share of a head's dimensions, from the first on, that is rotated.
    """

    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated."""
        return int(head_dim * self.partial)


def parse_rope(config: ConfigReader, max_positions: int, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    """Read ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``.

    Raises:
        UnsupportedModelError: an unknown kind, key or value, or two spellings that disagree.
    """
    table = _open_table(config)
    reader, kind = table.reader, table.kind
    outer_original = config.raw("original_max_position_embeddings")
    if kind == DYNAMIC:
        kind = "default"
        reader.number("factor")
        reader.only("original_max_position_embeddings", (max_positions,))
    if kind not in KINDS:
        raise reader.wrong("rope_type", kind, f"implemented kinds: {', '.join((*KINDS, DYNAMIC))}")
    fields: dict[str, Any] = {"theta": table.theta or default_theta, "kind": kind}
    if kind != "default":
        fields["factor"] = _factor(reader, kind, max_positions)
    if kind in ("llama3", "yarn"):
        inner_original = reader.integer("original_max_position_embeddings",
                                        outer_original or max_positions)
        if outer_original is not None and outer_original != inner_original:
            raise config.wrong("original_max_position_embeddings", outer_original,
                               f"the rope table says {inner_original}")
        fields["original_max_positions"] = inner_original
    elif outer_original is not None and outer_original != max_positions:
        raise config.wrong("original_max_position_embeddings", outer_original,
                           f"rope kind {kind!r} has no use for it")
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if low >= high:
            raise reader.wrong("high_freq_factor", high, f"it must exceed low_freq_factor {low}")
        fields |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        fields |= {"beta_fast": reader.number("beta_fast", 32.0),
                   "beta_slow": reader.number("beta_slow", 1.0), "truncate": reader.flag("truncate", True),
                   "attention_factor": _yarn_attention(reader, fields["factor"])}
    reader.finish(harmless=(), inert={"partial_rotary_factor": (1, 1.0)})
    return RopeConfig(**fields)


class _RopeTable(NamedTuple):
    """A rope's table, its kind, and theta if it is given."""

    reader: ConfigReader
    kind: str
    theta: float | None


def _open_table(config: ConfigReader) -> _RopeTable:
    """The rope's table in either spelling.

    Raises:
        UnsupportedModelError: it is no table, or two spellings disagree.
    """
    old, new = config.raw("rope_scaling"), config.raw("rope_parameters")
    theta = config.number("rope_theta", 0) if config.raw("rope_theta") is not None else None
    table = _table(config, old, new)
    reader = ConfigReader(table, f"{config.where}, {'rope_parameters' if new else 'rope_scaling'}")
    if table.get("rope_theta") is not None:
        inner = reader.number("rope_theta")
        if theta is not None and theta != inner:
            raise config.wrong("rope_theta", theta, f"rope_parameters says {inner}")
        theta = inner
    reader.raw("rope_theta")
    kind, legacy = reader.raw("rope_type"), reader.raw("type")
    if kind is not None and legacy is not None and kind != legacy:
        raise reader.wrong("type", legacy, f"rope_type says {kind!r}")
    return _RopeTable(reader, kind or legacy or "default", theta)


def _table(config: ConfigReader, old: object, new: object) -> Mapping[str, Any]:
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise config.wrong(key, value, "it must be a table")
    if old and new and old != new:
        raise config.wrong("rope_scaling", old, "rope_parameters is given too and differs")
    table = new or old or {}
    assert isinstance(table, dict)
    for key, value in table.items():
        if isinstance(value, dict):
            raise config.wrong("rope_parameters", table, f"a rope of its own for {key!r} is not implemented")
    return table


def _factor(reader: ConfigReader, kind: str, max_positions: int) -> float:
    if kind == "yarn" and reader.raw("factor") is None:
        return max_positions / reader.integer("original_max_position_embeddings", max_positions)
    return reader.number("factor")


def _yarn_attention(reader: ConfigReader, factor: float) -> float:
    mscale, all_dim = reader.raw("mscale"), reader.raw("mscale_all_dim")
    if reader.raw("attention_factor") is not None:
        return reader.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and all_dim:
        return magnitude(reader.number("mscale")) / magnitude(reader.number("mscale_all_dim"))
    return magnitude(1.0)


LONG_KINDS = ("default", "longrope", "su")
"""``su`` is longrope's first name."""


def parse_longrope(config: ConfigReader, max_positions: int, head_dim: int,
                   original_default: int) -> RopeConfig:
    """Read a rope that may be long (https://arxiv.org/abs/2402.13753, as Phi-3's config describes it), and
    may turn a share of each head's dimensions only.

    Sequences that end within the trained context have one set of wavelengths, longer ones another.

    Args:
        max_positions: the model's context.
        head_dim: dimensions of a head; there is a factor for each pair of rotated ones.
        original_default: ``original_max_position_embeddings`` where it is missing.

    Raises:
        UnsupportedModelError: another kind, a list of another length, or spellings that disagree.
    """
    table = _open_table(config)
    reader, kind = table.reader, table.kind
    if kind not in LONG_KINDS:
        raise reader.wrong("rope_type", kind, f"implemented kinds here: {', '.join(LONG_KINDS[:2])}")
    original = config.integer("original_max_position_embeddings", original_default, minimum=2)
    if reader.integer("original_max_position_embeddings", original, minimum=2) != original:
        raise reader.wrong("original_max_position_embeddings",
                           reader.raw("original_max_position_embeddings"), f"beside it is {original}")
    partial = _partial(config, reader)
    rotated = int(head_dim * partial)
    if rotated < 2 or rotated % 2:
        raise config.wrong("partial_rotary_factor", partial,
                           f"of {head_dim} dimensions an even number must be rotated")
    if kind == "default":
        reader.finish(harmless=(), inert={})
        return RopeConfig(table.theta or DEFAULT_THETA, partial=partial)
    factor = reader.number("factor", max_positions / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_factors(reader, f"{reach}_factor", rotated // 2) for reach in ("short", "long"))
    rope = RopeConfig(table.theta or DEFAULT_THETA, "longrope", factor, original, partial=partial,
                      attention_factor=reader.number("attention_factor", stretch), short_factors=short,
                      long_factors=long)
    reader.finish(harmless=(), inert={})
    return rope


def _partial(config: ConfigReader, reader: ConfigReader) -> float:
    outer, inner = config.raw("partial_rotary_factor"), reader.raw("partial_rotary_factor")
    if outer is not None and inner is not None and outer != inner:
        raise config.wrong("partial_rotary_factor", outer, f"the rope table says {inner}")
    where = config if inner is None else reader
    share = where.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise where.wrong("partial_rotary_factor", share, "it is a share, at most 1")
    return share


def _factors(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    values = reader.raw(key)
    if not isinstance(values, list) or len(values) != count:
        raise reader.wrong(key, values, f"it must list {count} numbers")
    return tuple(ConfigReader({key: value}, reader.where).number(key) for value in values)
