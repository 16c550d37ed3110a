"""Llama, https://arxiv.org/abs/2302.13971, and the models made like it (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, parse_dense, uniform_windows
from quantkit.models.reader import ConfigReader


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """``attention_bias`` means all four projections of attention, ``mlp_bias`` all three of the MLP."""
    reader = ConfigReader(config, "config.json of a llama model")
    bias = reader.flag("attention_bias")
    return parse_dense(reader, "llama", windows=uniform_windows(reader, None), qkv_bias=bias, o_bias=bias,
                       mlp_bias=reader.flag("mlp_bias"))


ARCHITECTURE = Architecture("llama", ("LlamaForCausalLM",), parse)
