"""Phi-3, https://arxiv.org/abs/2404.14219, and Phi-4: q, k and v are one Linear, gate and up another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, head_size, parse_dense, uniform_windows
from quantkit.models.longrope import parse_longrope
from quantkit.models.reader import ConfigReader

POSITIONS = 4096


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """A missing ``sliding_window`` means none. Some sizes rotate a share of each head only."""
    reader = ConfigReader(config, "config.json of a phi3 model")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.only(key, (False,))
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.only(key, (1,))
    stored = reader.raw("sliding_window")
    window = None if stored is None else reader.integer("sliding_window")
    rope = parse_longrope(reader, reader.integer("max_position_embeddings", POSITIONS), head_size(reader),
                          POSITIONS)
    return parse_dense(reader, "phi3", windows=uniform_windows(reader, window), qkv_bias=False, o_bias=False,
                       max_positions=POSITIONS, eps=1e-5, rope=rope, fused_projections=True)


ARCHITECTURE = Architecture("phi3", ("Phi3ForCausalLM",), parse)
