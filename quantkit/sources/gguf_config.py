"""GGUF metadata → ``config.json`` in Hugging Face's terms; a key that would change the maths and has no
counterpart is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.sources.gguf_families import GGUFFamily, family_of
from quantkit.sources.gguf_metadata import GGUFMetadata, decimal
from quantkit.sources.gguf_rope import KEYS, rope_settings
from quantkit.support.errors import SourceError

_READ = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
         "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
         "attention.layer_norm_rms_epsilon", "attention.sliding_window", "expert_count",
         "expert_used_count"} | KEYS
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
"""Keys of the architecture that say nothing about the maths."""


def hf_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
              tables: Mapping[str, np.ndarray], where: str) -> dict[str, Any]:
    """The ``config.json`` that the metadata means.

    Args:
        metadata: all keys.
        shapes: of every tensor by Hugging Face name.
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
