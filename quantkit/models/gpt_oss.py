"""gpt-oss, https://arxiv.org/abs/2508.10925: experts in every layer, with biases and a clamped activation,
attention sinks, and a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import (
    ROUTER_TRAINING,
    Experts,
    ModelConfig,
    expert_counts,
    layer_count,
    parse_dense,
    periodic_windows,
)
from quantkit.models.reader import ConfigReader
from quantkit.models.rope_config import parse_rope
from quantkit.ops.activation import CLAMPED_GAIN

POSITIONS, THETA, WINDOW, HEAD_DIM = 131_072, 150_000.0, 128, 64
ROPE: Mapping[str, Any] = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                           "truncate": False, "original_max_position_embeddings": 4096}
"""Where a config has no table, as transformers takes it."""


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """``layer_types`` if given, else layers 0, 2, … have the window. The chosen experts' weights sum to 1."""
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = {**config, "rope_parameters": dict(ROPE)}
    reader = ConfigReader(config, "config.json of a gpt_oss model")
    if reader.null("sliding_window"):
        raise reader.wrong("sliding_window", None, "layers of this family have a window")
    reader.only("mlp_bias", (True,))
    reader.only("swiglu_alpha", (CLAMPED_GAIN,))
    bias = reader.flag("attention_bias", True)
    count, chosen = expert_counts(reader, 128, 4)
    reader.only("experts_per_token", (chosen,))  # its older name, beside the new one
    experts = Experts(count, chosen, reader.integer("intermediate_size"), True, (True,) * layer_count(reader),
                      router="router", router_bias=True)
    rope = parse_rope(reader, reader.integer("max_position_embeddings", POSITIONS), THETA)
    reader.only("initial_context_length", (rope.original_max_positions,))
    return parse_dense(
        reader, "gpt_oss", windows=periodic_windows(reader, reader.integer("sliding_window", WINDOW), 2),
        qkv_bias=bias, o_bias=bias, mlp_bias=True, kv_heads=8, max_positions=POSITIONS, head_dim=HEAD_DIM,
        eps=1e-5, rope=rope, ignored=ROUTER_TRAINING, experts=experts, activation="clamped_silu",
        activation_limit=reader.number("swiglu_limit", 7.0), attention_sinks=True)


ARCHITECTURE = Architecture("gpt_oss", ("GptOssForCausalLM",), parse)
