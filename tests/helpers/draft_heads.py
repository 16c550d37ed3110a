"""Heads of random weights, as their published checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantkit.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def random_tensors(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Norms near 1, matrices that keep a vector's length."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * (0.3 if len(shape) == 1 else 1.5 * shape[1] ** -0.5)
            + (len(shape) == 1) for name, shape in shapes.items()}


def layer_shapes(prefix: str, size: int, config: ModelConfig) -> Shapes:
    """Of a decoder layer whose attention takes ``size`` numbers."""
    attention, mlp, hidden = f"{prefix}.self_attn", f"{prefix}.mlp", config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {f"{attention}.q_proj.weight": (query, size), f"{attention}.k_proj.weight": (kv, size),
            f"{attention}.v_proj.weight": (kv, size), f"{attention}.o_proj.weight": (hidden, query),
            f"{mlp}.gate_proj.weight": (config.intermediate_size, hidden),
            f"{mlp}.up_proj.weight": (config.intermediate_size, hidden),
            f"{mlp}.down_proj.weight": (hidden, config.intermediate_size),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,)}


def eagle3_files(folder: Path, config: ModelConfig, prefix: str = "midlayer", vocab: int = 100,
                 **keys: object) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Write an EAGLE-3 head for a model: its weights, and which ids it drafts."""
    hidden = config.hidden_size
    weights = random_tensors({"fc.weight": (hidden, 3 * hidden), f"{prefix}.hidden_norm.weight": (hidden,),
                              "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden),
                              **layer_shapes(prefix, 2 * hidden, config)})
    order = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))[:vocab].sort()[0]
    files = weights | {"d2t": order - torch.arange(vocab),
                       "t2d": torch.zeros(config.vocab_size, dtype=torch.bool)}
    folder.mkdir()
    save_file(files, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size, "draft_vocab_size": vocab, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta, "max_position_embeddings": 512, "torch_dtype": "float32", **keys}))
    return weights, order


def mtp_shapes(config: ModelConfig, block: str, norms: tuple[str, str, str], projection: str) -> Shapes:
    """Of a head for further tokens."""
    hidden = config.hidden_size
    return {f"{projection}.weight": (hidden, 2 * hidden), **{f"{norm}.weight": (hidden,) for norm in norms},
            **layer_shapes(block, hidden, config)}
