"""Qwen3, https://arxiv.org/abs/2505.09388: queries and keys are normalized a head, heads are wide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, mixed_windows, parse_dense
from quantkit.models.reader import ConfigReader


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """``head_dim`` is 128 unless given: it is not ``hidden_size / num_attention_heads``."""
    reader = ConfigReader(config, "config.json of a qwen3 model")
    bias = reader.flag("attention_bias")
    reader.only("mlp_bias", (False,))
    windows = mixed_windows(reader, default_window=4096, default_full_layers=28)
    return parse_dense(reader, "qwen3", windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True,
                       kv_heads=32, max_positions=32768, head_dim=128)


ARCHITECTURE = Architecture("qwen3", ("Qwen3ForCausalLM",), parse)
