"""GGUF metadata → ``config.json`` in Hugging Face's terms; a key that would change the maths and has no
counterpart is an error.

GGUF says some scalings of the RoPE by keys (``linear``, ``yarn``) and others by tensors that divide each
frequency: one for Llama 3.1's scaling, two for LongRoPE, of which llama.cpp takes one by the length of the
context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.sources.gguf_families import (
    HF_FOLDER,
    LONG_FACTORS,
    ROPE_FREQS,
    SHORT_FACTORS,
    GGUFFamily,
    GGUFMetadata,
    decimal,
    family_of,
)
from quantkit.support.errors import SourceError

_TYPE, _FACTOR = "rope.scaling.type", "rope.scaling.factor"
_ORIGINAL, _MAGNITUDE = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_YARN = {"rope.scaling.yarn_attn_factor": "attention_factor", "rope.scaling.yarn_beta_fast": "beta_fast",
         "rope.scaling.yarn_beta_slow": "beta_slow"}
_EXTRAPOLATION = "rope.scaling.yarn_ext_factor"
_ROPE_KEYS = frozenset({"rope.dimension_count", "rope.freq_base", "rope.scale_linear", _TYPE, _FACTOR,
                        _ORIGINAL, _MAGNITUDE, _EXTRAPOLATION, *_YARN})
_READ = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
         "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
         "attention.layer_norm_rms_epsilon", "attention.sliding_window", "expert_count",
         "expert_used_count"} | _ROPE_KEYS
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
"""Keys of the architecture that say nothing about the maths."""


def hf_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
              tables: Mapping[str, np.ndarray], where: str) -> dict[str, Any]:
    """The ``config.json`` that the metadata means.

    Args:
        metadata: the keys of the whole file.
        shapes: the shape of every tensor by its Hugging Face name.
        tables: the RoPE's, by GGUF's name, float32 ``[rotated dimensions / 2]``: those that the file has.
        where: the file's name, for errors.

    Raises:
        SourceError: an unknown architecture, a missing or absurd value, or a key that would change
            the maths and can't be said in ``config.json``.
    """
    family = family_of(metadata, where)
    meta = GGUFMetadata(metadata, where, metadata["general.architecture"], _READ | _HARMLESS | family.keys)
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    if meta.raw("attention.key_length") is None and hidden % heads:
        raise meta.bad("attention.head_count", heads, f"it doesn't divide embedding_length {hidden}")
    dim = meta.integer("attention.key_length", hidden // heads)
    _refuse_other_maths(meta, dim, family)
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != 2:
        raise SourceError(f"{where} has no token_embd.weight of two dimensions",
                          why="the model can't be built without it", next="use another conversion")
    settings = family.settings(meta, dim)
    if "intermediate_size" not in settings:
        settings["intermediate_size"] = meta.integer("feed_forward_length")
    config: dict[str, Any] = {
        "architectures": [family.model_class], "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": meta.integer("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads), "head_dim": dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": decimal(meta.real("attention.layer_norm_rms_epsilon")),
        **settings, **rope_settings(meta, family, tables, dim),
        "vocab_size": embedding[0], "tie_word_embeddings": "lm_head.weight" not in shapes,
        "torch_dtype": "bfloat16"}
    if family.model_type == "llama":
        config["attention_bias"] = any(name.endswith("q_proj.bias") for name in shapes)
        config["mlp_bias"] = any(name.endswith("up_proj.bias") for name in shapes)
    for name in ("bos", "eos"):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(value) is int and 0 <= value < embedding[0]:
            config[f"{name}_token_id"] = value
    return config


def _refuse_other_maths(meta: GGUFMetadata, dim: int, family: GGUFFamily) -> None:
    if (width := meta.integer("attention.value_length", dim)) != dim:
        raise meta.bad("attention.value_length", width, f"heads of one width, {dim}, are needed")
    if meta.raw("attention.causal") not in (None, True):
        raise meta.bad("attention.causal", meta.raw("attention.causal"), "only causal attention is supported")
    window = meta.integer("attention.sliding_window", 0, least=0)
    if 0 < window < meta.integer("context_length") and not family.windowed:
        raise meta.bad("attention.sliding_window", window, "its pattern over the layers is not in the file")
    if meta.integer("expert_count", 0, least=0) and not family.experts:
        raise meta.bad("expert_count", meta.raw("expert_count"), f"{family.model_type} has no experts here")


def rope_settings(meta: GGUFMetadata, family: GGUFFamily, tables: Mapping[str, np.ndarray],
                  dim: int) -> dict[str, Any]:
    """What ``config.json`` says about the RoPE.

    Args:
        meta: the architecture's keys.
        family: the family, which says what is possible.
        tables: float32 ``[rotated dimensions / 2]`` by GGUF's name, those of ``ROPE_TABLES`` that are there.
        dim: the dimensions of a head.

    Raises:
        SourceError: a scaling that the family's models don't have, or one that ``config.json`` can't say.
    """
    theta = meta.real("rope.freq_base", 10000.0)
    settings: dict[str, Any] = {"rope_theta": int(theta) if theta.is_integer() else theta}
    rotated = meta.integer("rope.dimension_count", dim)
    if rotated != dim:
        if not family.longrope:
            raise meta.bad("rope.dimension_count", rotated, f"all {dim} dimensions of a head must be rotated")
        settings["partial_rotary_factor"] = _share(meta, rotated, dim)
    if scaling := _scaling(meta, family, tables, theta, rotated):
        settings["rope_scaling"] = scaling
    if scaling and scaling["rope_type"] == "longrope":
        settings["original_max_position_embeddings"] = _original(meta)
    return settings


def _share(meta: GGUFMetadata, rotated: int, dim: int) -> float:
    """The share of a head that is rotated, so that it gives the same number of dimensions again."""
    share = rotated / dim
    if int(dim * share) != rotated:
        share = math.nextafter(share, 1)
    if rotated > dim or rotated % 2 or int(dim * share) != rotated:
        raise meta.bad("rope.dimension_count", rotated, f"an even number of a head's {dim} is needed")
    return share


def _scaling(meta: GGUFMetadata, family: GGUFFamily, tables: Mapping[str, np.ndarray], theta: float,
             rotated: int) -> dict[str, Any] | None:
    kind = meta.raw(_TYPE) or "linear"  # as llama.cpp takes it: a factor alone is linear
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise meta.bad(_TYPE, kind, "known: none, linear, yarn, longrope")
    for key in (*_YARN, _EXTRAPOLATION):
        if kind != "yarn" and meta.raw(key) is not None:
            raise meta.bad(key, meta.raw(key), f"the RoPE is scaled as {kind!r}, which has no use for it")
    long = kind == "longrope" or LONG_FACTORS in tables or SHORT_FACTORS in tables
    if long and not family.longrope:
        raise SourceError(f"{meta.where} scales its RoPE by LongRoPE (rope_factors_long)", next=HF_FOLDER,
                          why=f"a {family.model_type} model's config.json can't say it")
    if not long and kind != "yarn" and meta.real(_MAGNITUDE, 1.0) != 1.0:
        raise meta.bad(_MAGNITUDE, meta.raw(_MAGNITUDE), "only yarn and LongRoPE are known to have it")
    key = _FACTOR if meta.raw(_FACTOR) is not None else "rope.scale_linear"
    factor = decimal(meta.real(key, 1.0)) if kind in ("linear", "yarn") else 1.0
    if family.longrope:
        if kind == "yarn" or factor != 1.0 or ROPE_FREQS in tables:
            raise meta.bad(_TYPE, kind, f"a {family.model_type} model's RoPE is scaled by LongRoPE, or not")
        return _longrope(meta, tables, rotated) if long else None
    if kind == "yarn":
        if ROPE_FREQS in tables:
            raise meta.bad(_TYPE, kind, "a table (rope_freqs) scales the RoPE too")
        return _yarn(meta, family, factor)
    if (table := tables.get(ROPE_FREQS)) is not None:
        return _llama3(meta, family, table, theta, rotated, factor)
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _yarn(meta: GGUFMetadata, family: GGUFFamily, factor: float) -> dict[str, Any]:
    """https://arxiv.org/abs/2309.00071; with other extrapolation than its own, llama.cpp mixes it with linear
    interpolation. The ends of the ramp, which it rounds always, are as the family was trained."""
    if meta.real(_EXTRAPOLATION, 1.0) != 1.0:
        raise meta.bad(_EXTRAPOLATION, meta.raw(_EXTRAPOLATION), "only 1 can be said in config.json")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": _original(meta)}
    if not family.truncate:
        scaling["truncate"] = False
    if (share := meta.real(_MAGNITUDE, 1.0)) != 1.0:  # of yarn's own, which llama.cpp multiplies by it
        scaling["attention_factor"] = decimal(share * yarn_magnitude(factor))
    return scaling | {name: decimal(meta.real(key)) for key, name in _YARN.items()
                      if meta.raw(key) is not None}


def yarn_magnitude(factor: float) -> float:
    """What yarn multiplies cos and sin by where nothing else is said."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(meta: GGUFMetadata, tables: Mapping[str, np.ndarray], rotated: int) -> dict[str, Any]:
    """https://arxiv.org/abs/2402.13753. A magnitude that isn't there is 1 for llama.cpp."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for name, key in ((SHORT_FACTORS, "short_factor"), (LONG_FACTORS, "long_factor")):
        table = tables.get(name)
        if table is None or table.shape != (rotated // 2,) or not np.all((table > 0) & (table < 1e30)):
            problem = "no" if table is None else "a useless"
            raise SourceError(f"{meta.where} has {problem} {name}", next=HF_FOLDER,
                              why=f"LongRoPE needs {rotated // 2} positive factors there")
        scaling[key] = [float(value) for value in table]
    magnitude, original = meta.real(_MAGNITUDE, 1.0), max(_original(meta), 2)
    stretch = meta.integer("context_length") / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    if not math.isclose(magnitude, usual, rel_tol=1e-6):
        scaling["attention_factor"] = decimal(magnitude)
    return scaling


def _original(meta: GGUFMetadata) -> int:
    return meta.integer(_ORIGINAL, meta.integer("context_length"))


def _llama3(meta: GGUFMetadata, family: GGUFFamily, table: np.ndarray, theta: float, dim: int,
            stretch: float) -> dict[str, Any]:
    original = meta.integer(_ORIGINAL, 8192)
    factor = round(float(table.max()), 4)
    if (stretch != 1.0 or not family.freqs_table or table.shape != (dim // 2,)
            or not math.isfinite(factor) or factor <= 0
            or not np.allclose(table, _llama3_factors(theta, dim, factor, original), rtol=1e-3)):
        raise SourceError(f"{meta.where} scales its RoPE by a table (rope_freqs) that is not Llama 3.1's",
                          why="config.json can't say it", next=HF_FOLDER)
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original}


def _llama3_factors(theta: float, dim: int, factor: float, original: int) -> np.ndarray:
    """What Llama 3.1's scaling divides each frequency by, for its published ramp from 1 to 4.

    Long wavelengths are divided by ``factor``, short ones kept, https://arxiv.org/abs/2407.21783.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
