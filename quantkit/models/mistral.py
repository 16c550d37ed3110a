"""Mistral 7B, https://arxiv.org/abs/2310.06825: Llama's layers with a sliding window in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, parse_dense, uniform_windows
from quantkit.models.reader import ConfigReader

DEFAULT_WINDOW = 4096


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """A missing ``sliding_window`` means 4096, null means none: that is what transformers reads."""
    reader = ConfigReader(config, "config.json of a mistral model")
    window = None
    if not reader.null("sliding_window"):
        window = reader.integer("sliding_window", DEFAULT_WINDOW)
    for key in ("attention_bias", "mlp_bias"):
        reader.only(key, (False,))
    return parse_dense(reader, "mistral", windows=uniform_windows(reader, window), qkv_bias=False,
                       o_bias=False, kv_heads=8, max_positions=4096 * 32)


ARCHITECTURE = Architecture("mistral", ("MistralForCausalLM",), parse)
