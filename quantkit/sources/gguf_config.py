"""GGUF metadata → ``config.json`` in Hugging Face's terms; a key that would change the maths and has no
counterpart is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.errors import SourceError, did_you_mean
from quantkit.sources.gguf_families import FAMILIES, GGUFFamily
from quantkit.sources.gguf_metadata import HF_FOLDER, GGUFMetadata

_READ = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
         "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
         "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count",
         "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
         "rope.scaling.original_context_length", "expert_count", "expert_used_count"}
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
"""Keys of the architecture that say nothing about the maths."""


def family_of(metadata: Mapping[str, Any], where: str) -> GGUFFamily:
    """The family of ``general.architecture``. Raises SourceError: an unknown one."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        name = str(architecture)[:80]
        raise SourceError(f"{where} holds a {name!r} model", why=did_you_mean(name, FAMILIES), next=HF_FOLDER)
    return FAMILIES[architecture]


def hf_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
              rope_factors: np.ndarray | None, where: str) -> dict[str, Any]:
    """The ``config.json`` that the metadata means.

    Args:
        metadata: all keys.
        shapes: of every tensor by Hugging Face name.
        rope_factors: ``rope_freqs.weight``, float32 ``[head_dim/2]``, if the file has it.
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
    _refuse_other_maths(meta, dim, family.windowed)
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != 2:
        raise SourceError(f"{where} has no token_embd.weight of two dimensions",
                          why="the model can't be built without it", next="use another conversion")
    theta = meta.real("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [family.model_class], "model_type": family.model_type,
        **family.settings(meta, dim), "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads), "head_dim": dim,
        "max_position_embeddings": meta.integer("context_length"),
        # stored as float32: 1e-5 comes back as 9.999999747378752e-06
        "rms_norm_eps": float(f"{meta.real('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": int(theta) if theta.is_integer() else theta,
        "vocab_size": embedding[0], "tie_word_embeddings": "lm_head.weight" not in shapes,
        "torch_dtype": "bfloat16"}
    if meta.architecture == "llama":
        config["attention_bias"] = any(name.endswith("q_proj.bias") for name in shapes)
        config["mlp_bias"] = any(name.endswith("up_proj.bias") for name in shapes)
    if scaling := _rope_scaling(meta, rope_factors, theta, dim):
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(value) is int and 0 <= value < embedding[0]:
            config[f"{name}_token_id"] = value
    return config


def _refuse_other_maths(meta: GGUFMetadata, dim: int, windowed: bool) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, dim) != dim:
            raise meta.bad(key, meta.raw(key), f"heads of one width, {dim}, rotated whole are needed")
    if meta.raw("attention.causal") not in (None, True):
        raise meta.bad("attention.causal", meta.raw("attention.causal"), "only causal attention is supported")
    window = meta.integer("attention.sliding_window", 0, least=0)
    if 0 < window < meta.integer("context_length") and not windowed:
        raise meta.bad("attention.sliding_window", window, "its pattern over the layers is not in the file")
    if meta.integer("expert_count", 0, least=0):
        raise meta.bad("expert_count", meta.raw("expert_count"), "mixtures of experts are not supported")


def _rope_scaling(meta: GGUFMetadata, factors: np.ndarray | None, theta: float,
                  dim: int) -> dict[str, Any] | None:
    kind = meta.raw("rope.scaling.type") or ("linear" if meta.raw("rope.scale_linear") else "none")
    if kind not in ("none", "linear"):
        raise meta.bad("rope.scaling.type", kind, "only 'none' and 'linear' can be taken from GGUF metadata")
    key = "rope.scaling.factor" if meta.raw("rope.scaling.factor") is not None else "rope.scale_linear"
    stretch = meta.real(key, 1.0) if kind == "linear" else 1.0
    if factors is None:
        return {"rope_type": "linear", "factor": stretch} if stretch != 1.0 else None
    original = meta.integer("rope.scaling.original_context_length", 8192)
    factor = round(float(factors.max()), 4)
    if (stretch != 1.0 or factors.shape != (dim // 2,) or not math.isfinite(factor) or factor <= 0
            or not np.allclose(factors, _llama3_factors(theta, dim, factor, original), rtol=1e-3)):
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
