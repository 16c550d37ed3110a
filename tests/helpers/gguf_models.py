"""Tiny models as llama.cpp's converter lays them out in GGUF. The names of tensors are those of the gguf
library's own table; nothing here is from quantkit's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import quantize

from quantkit.testing import tiny_tokenizer
from quantkit.testing.tiny import SPECIAL, tiny_config, tiny_weights

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "mistral": MODEL_ARCH.LLAMA, "mixtral": MODEL_ARCH.LLAMA,
                 "gpt_oss": MODEL_ARCH.GPT_OSS,
                 "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "qwen3_moe": MODEL_ARCH.QWEN3MOE,
                 "phi3": MODEL_ARCH.PHI3, "gemma2": MODEL_ARCH.GEMMA2, "gemma3_text": MODEL_ARCH.GEMMA3}
EXPERT = re.compile(r"(model\.layers\.\d+\.\w+)\.experts\.(\d+)\.(\w+\.(?:weight|bias))")


def write_model(path: Path, family: str, *, shards: int = 1,
                tokenizer: Callable[[GGUFWriter], None] | None = None, mxfp4: bool = False,
                **overrides: Any) -> tuple[dict, dict]:
    """Write a tiny random model; with several ``shards`` beside each other, as the library names them.

    Args:
        tokenizer: writes another than that of ``quantkit.testing``.
        mxfp4: whether experts' weights are numbers that MXFP4 has, and are stored as such.

    Returns:
        Its ``config.json``, and its tensors by Hugging Face names, bfloat16.
    """
    config = tiny_config(family, **overrides)
    weights = tiny_weights(config)
    if mxfp4:
        weights |= {name: on_mxfp4_grid(weight) for name, weight in weights.items()
                    if (match := EXPERT.fullmatch(name)) and match[3].endswith(".weight")}
    stored = dict(gguf_tensors(config, weights))
    largest = -(-len(stored) // shards) if shards > 1 else 0
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[ARCHITECTURES[family]], split_max_tensors=largest)
    write_settings(writer, config)
    if tokenizer is None:
        write_tokenizer(writer, adds_bos=family.startswith(("llama", "mi", "gemma")))
    else:
        tokenizer(writer)
    for name, values in stored.items():
        kind = GGMLQuantizationType.MXFP4 if mxfp4 and name.endswith("_exps.weight") else None
        writer.add_tensor(name, values if kind is None else quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, weights


def on_mxfp4_grid(weight: torch.Tensor) -> torch.Tensor:
    """Nearby numbers: each 32 of them are a power of 2 times 4-bit floats, the first of which is 6."""
    rows = weight.float().reshape(-1, 32)
    scale = 2.0 ** (rows.abs().amax(1, keepdim=True) / 6).log2().ceil()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = grid[(rows.abs() / scale).unsqueeze(2).sub(grid).abs().argmin(2)]
    levels[:, 0] = 6
    return (levels * scale * rows.sign()).reshape(weight.shape).to(weight.dtype)


def gguf_tensors(config: dict[str, Any],
                 weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's names and float32 values: rows of Llama's queries and keys interleaved, Gemma's norms as they
    multiply, experts in one tensor."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    names = get_tensor_name_map(ARCHITECTURES[family], layers)
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        values = weight.float().numpy()
        if match := EXPERT.fullmatch(name):
            module = f"{match[1]}.experts.{match[3]}"
            experts.setdefault(module, []).append(values)
            assert len(experts[module]) == int(match[2]) + 1
            continue
        if ARCHITECTURES[family] is MODEL_ARCH.LLAMA and (part := re.search(r"\.([qk])_proj\.", name)):
            values = interleaved(values, config["num_attention_heads" if part[1] == "q"
                                                else "num_key_value_heads"])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        yield _gguf_name(names, name), values
    for name, values in experts.items():
        yield _gguf_name(names, name), np.stack(values)
    scaling = config.get("rope_scaling") or {}
    for key in ("long_factor", "short_factor"):
        if key in scaling:
            yield f"rope_factors_{key.split('_')[0]}.weight", np.array(scaling[key], np.float32)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head: the first of the first half, the first of the second half, the second of the first."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half)
             for side in range(2)]
    return rows[order]


def write_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """The keys that the converter writes for this model."""
    family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    scaling = config.get("rope_scaling") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    if "head_dim" in config:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if family in ("llama", "mistral", "mixtral", "phi3"):
        writer.add_rope_dimension_count(int(dim * config.get("partial_rotary_factor", 1)))
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if family.startswith("gemma") or family in ("phi3", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma3_text":
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_rope_freq_base_swa(float(config["rope_local_base_freq"]))
    _write_scaling(writer, config, scaling)


def _write_scaling(writer: GGUFWriter, config: dict[str, Any], scaling: dict[str, Any]) -> None:
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def write_tokenizer(writer: GGUFWriter, adds_bos: bool) -> None:
    """The tokenizer of ``quantkit.testing``, a byte-level BPE that cuts text as GPT-2 does."""
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(adds_bos)


def _merges(tokenizer: Any) -> list[str]:
    return [" ".join(pair) if isinstance(pair, list) else pair
            for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _gguf_name(names: Any, name: str) -> str:
    # the converter gives Mixtral's experts the names of Meta's own release
    known = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.(w\d)",
                   r"\1.feed_forward.experts.\2", name)
    if known.endswith(".sinks"):
        known += ".weight"
    stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return str(stored)
