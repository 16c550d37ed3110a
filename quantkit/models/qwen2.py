"""Qwen2 and Qwen2.5, https://arxiv.org/abs/2407.10671: biases on q, k and v only. So has MiMo,
https://arxiv.org/abs/2505.07608, whose files hold a head that drafts further tokens too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, mixed_windows, parse_dense
from quantkit.models.reader import ConfigReader


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Windows follow ``layer_types``, or ``use_sliding_window`` with ``max_window_layers``."""
    family = str(config["model_type"])
    reader = ConfigReader(config, f"config.json of a {family} model")
    reader.only("attention_bias", (True,))
    reader.only("mlp_bias", (False,))
    reader.only("use_mrope", (False,))
    windows = mixed_windows(reader, default_window=4096, default_full_layers=28)
    return parse_dense(reader, family, windows=windows, qkv_bias=True, o_bias=False, kv_heads=32,
                       max_positions=32768)


ARCHITECTURE = Architecture("qwen2", ("Qwen2ForCausalLM",), parse)
MIMO = Architecture("mimo", ("MiMoForCausalLM",), parse)
