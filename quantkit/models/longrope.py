"""LongRoPE, https://arxiv.org/abs/2402.13753, as Phi-3's ``config.json`` describes it.

Sequences that end within the trained context have one set of wavelengths, longer ones another.
"""

from __future__ import annotations

import math

from quantkit.models.reader import ConfigReader
from quantkit.models.rope_config import DEFAULT_THETA, RopeConfig, open_table

KINDS = ("default", "longrope", "su")
"""``su`` is longrope's first name."""


def parse_longrope(config: ConfigReader, max_positions: int, head_dim: int,
                   original_default: int) -> RopeConfig:
    """Read a rope that may be long, and may turn a share of each head's dimensions only.

    Args:
        config: the model's.
        max_positions: of the model.
        head_dim: of a head; the factors are one a pair of its rotated dimensions.
        original_default: ``original_max_position_embeddings`` where it is missing.

    Raises:
        UnsupportedModelError: another kind, a list of another length, or spellings that disagree.
    """
    reader, kind, theta = open_table(config)
    if kind not in KINDS:
        raise reader.wrong("rope_type", kind, f"implemented kinds here: {', '.join(KINDS[:2])}")
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
        return RopeConfig(theta or DEFAULT_THETA, partial=partial)
    factor = reader.number("factor", max_positions / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_factors(reader, f"{reach}_factor", rotated // 2) for reach in ("short", "long"))
    rope = RopeConfig(theta or DEFAULT_THETA, "longrope", factor, original, partial=partial,
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
