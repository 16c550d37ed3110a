"""What a GGUF file says about a model's shape, and the tables of its RoPE.

The keys are written from the model's configuration, then read back as a file's would be. Whatever doesn't
come back as it was can't be said in GGUF, and is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quantkit.export.gguf.file import Value
from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import inverse_frequencies
from quantkit.models.rope_config import RopeConfig
from quantkit.sources.gguf_config import hf_config, yarn_magnitude
from quantkit.sources.gguf_families import FAMILIES, LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS, GGUFFamily
from quantkit.support.errors import QuantkitError, UnsupportedModelError, did_you_mean

_SAME = {"mistral": "llama"}
"""Families that GGUF has no name of their own for: whose model they are there."""
_UNTIED = ("gpt-oss",)
"""Architectures for which llama.cpp wants a head beside the embedding."""
_WINDOWED = ("gemma2", "gemma3", "gpt-oss")
"""Architectures whose windows llama.cpp obeys."""
_NEXT = "run it with quantkit, or export it to another layout for vLLM"
_YARN_RAMP = (32.0, 1.0)
"""``beta_fast`` and ``beta_slow``, for which llama.cpp reads no keys in these families."""
_TOLERANCE = 1e-6
"""Relative: keys are float32."""


@dataclass(frozen=True)
class ModelKeys:
    """What describes a model in a file.

    Attributes:
        family: how its tensors are called.
        values: by key, without ``general.`` keys but the architecture.
        tables: further tensors by GGUF's name, float32 ``[rotated dimensions / 2]``.
        notes: sentences about what is otherwise than in the checkpoint.
    """

    family: GGUFFamily
    values: dict[str, Value]
    tables: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()


def model_keys(config: ModelConfig) -> ModelKeys:
    """Keys and tables of a model.

    Raises:
        UnsupportedModelError: llama.cpp has no such family, or something in the config has no key.
    """
    name = _SAME.get(config.model_type, config.model_type)
    if name not in FAMILIES:
        raise UnsupportedModelError(f"GGUF has no place for a {config.model_type} model",
                                    why=did_you_mean(name, [*FAMILIES, *_SAME]), next=_NEXT)
    family = FAMILIES[name]
    notes = []
    context = config.max_position_embeddings
    windows = [window for window in config.sliding_windows if window is not None]
    if family.architecture not in _WINDOWED and windows and min(windows) < context:
        context = min(windows)
        notes.append(f"context_length is {context:,}: beyond its sliding window, llama.cpp would let a "
                     f"{family.architecture} model see all tokens")
    _check_runnable(config, family)
    if config.rope.kind == "yarn" and not config.rope.truncate:
        notes.append("llama.cpp rounds the ends of yarn's ramp to whole dimensions, and has other logits "
                     "where they aren't")
    rope, tables = _rope(config)
    values: dict[str, Value] = {
        "block_count": config.num_layers, "context_length": context, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": config.vocab_size,
        **rope, **_experts(config, family), **_attention(config, family)}
    prefix = family.architecture
    keys = ModelKeys(family, {"general.architecture": prefix,
                              **{f"{prefix}.{key}": value for key, value in values.items()}},
                     tables, tuple(notes))
    _check(config, keys)
    return keys


def _experts(config: ModelConfig, family: GGUFFamily) -> dict[str, Value]:
    if config.experts is None:
        return {}
    size = {"expert_feed_forward_length": config.experts.intermediate_size}
    return {"expert_count": config.experts.count, "expert_used_count": config.experts.chosen,
            **(size if "expert_feed_forward_length" in family.keys else {})}


def _attention(config: ModelConfig, family: GGUFFamily) -> dict[str, Value]:
    """Windows, and Gemma's caps of scores and logits."""
    values: dict[str, Value] = {}
    windows = config.sliding_windows
    if family.windowed and (window := next(filter(None, windows), None)) is not None:
        values["attention.sliding_window"] = window
    if "attention.sliding_window_pattern" in family.keys and None in windows:
        values["attention.sliding_window_pattern"] = windows.index(None) + 1
    for key, cap in (("attn_logit_softcapping", config.attention_softcap),
                     ("final_logit_softcapping", config.logit_softcap)):
        if cap is not None:
            values[key] = float(cap)
    return values


def _rope(config: ModelConfig) -> tuple[dict[str, Value], dict[str, torch.Tensor]]:
    rope, dim = config.rope, config.head_dim
    values: dict[str, Value] = {"rope.freq_base": float(rope.theta),
                                "rope.dimension_count": rope.rotated(dim)}
    tables: dict[str, torch.Tensor] = {}
    if config.local_rope is not None:
        values["rope.freq_base_swa"] = float(config.local_rope.theta)
    if rope.kind in ("linear", "yarn", "longrope"):
        values["rope.scaling.type"] = rope.kind
    if rope.kind in ("linear", "yarn"):
        values["rope.scaling.factor"] = float(rope.factor)
    if rope.original_max_positions:
        values["rope.scaling.original_context_length"] = rope.original_max_positions
    share = rope.attention_factor / yarn_magnitude(rope.factor)
    if rope.kind == "yarn" and not math.isclose(share, 1.0, rel_tol=_TOLERANCE):
        values["rope.scaling.attn_factor"] = share
    if rope.kind == "longrope":
        values["rope.scaling.attn_factor"] = float(rope.attention_factor)
        tables = {SHORT_FACTORS: torch.tensor(rope.short_factors),
                  LONG_FACTORS: torch.tensor(rope.long_factors)}
    if rope.kind == "llama3":
        cpu = torch.device("cpu")
        plain = inverse_frequencies(RopeConfig(rope.theta), dim, cpu)
        tables = {ROPE_FREQS: plain / inverse_frequencies(rope, dim, cpu)}
    return values, tables


def _check_runnable(config: ModelConfig, family: GGUFFamily) -> None:
    """Raise UnsupportedModelError for what GGUF has keys for and llama.cpp doesn't do in this family."""
    rope, why = config.rope, ""
    if rope.kind == "llama3" and not family.freqs_table:
        why = "llama.cpp scales the RoPE as Llama 3 does in llama models only"
    if rope.kind == "yarn" and (rope.beta_fast, rope.beta_slow) != _YARN_RAMP:
        why = f"llama.cpp's yarn has a ramp from {_YARN_RAMP[0]:g} to {_YARN_RAMP[1]:g} rotations only"
    if config.tie_word_embeddings and family.architecture in _UNTIED:
        why = f"its {family.architecture} models have a head of their own, not the embedding"
    if why:
        raise UnsupportedModelError(f"llama.cpp can't run this {config.model_type} model", why=why,
                                    next=_NEXT)


def _check(config: ModelConfig, keys: ModelKeys) -> None:
    """Raise UnsupportedModelError unless the keys mean the model."""
    shapes = tensor_shapes(config)
    arrays = {name: table.numpy() for name, table in keys.tables.items()}
    try:
        back = parse_config(hf_config(_as_stored(keys.values), shapes, arrays, "the GGUF file"))
    except QuantkitError as error:
        raise UnsupportedModelError(f"GGUF can't describe this {config.model_type} model",
                                    why=f"its keys, read back: {error.what}: {error.why}",
                                    next=_NEXT) from error
    for field in dataclasses.fields(ModelConfig):
        wanted, given = getattr(config, field.name), getattr(back, field.name)
        if field.name == "sliding_windows" and keys.family.architecture not in _WINDOWED:
            continue
        if (field.name == "max_position_embeddings" and keys.notes
                and keys.family.architecture not in _WINDOWED):
            continue
        if field.name == "model_type":
            given = config.model_type
        if not _equal(wanted, given):
            raise UnsupportedModelError(
                f"GGUF can't describe this {config.model_type} model",
                why=f"llama.cpp's {keys.family.architecture} models have {field.name} {given}, not {wanted}",
                next=_NEXT)


def _as_stored(values: Mapping[str, Value]) -> dict[str, Any]:
    return {key: float(np.float32(value)) if isinstance(value, float) else value
            for key, value in values.items()}


def _equal(wanted: object, given: object) -> bool:
    """Whether two values are the same, numbers as float32."""
    if isinstance(wanted, RopeConfig) and isinstance(given, RopeConfig):
        ignored = {"factor"} if wanted.kind == "longrope" else set()  # it only decided the attention factor
        return all(_equal(getattr(wanted, field.name), getattr(given, field.name))
                   for field in dataclasses.fields(RopeConfig) if field.name not in ignored)
    if isinstance(wanted, tuple) and isinstance(given, tuple):
        return len(wanted) == len(given) and all(map(_equal, wanted, given))
    if isinstance(wanted, float) and isinstance(given, int | float):
        return math.isclose(wanted, given, rel_tol=_TOLERANCE)
    return wanted == given
