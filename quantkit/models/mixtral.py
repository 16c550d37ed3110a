"""Mixtral, https://arxiv.org/abs/2401.04088: Mistral's layers with experts in place of every MLP."""

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
    uniform_windows,
)
from quantkit.models.reader import ConfigReader
from quantkit.models.rope_config import parse_rope

POSITIONS = 4096 * 32


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """A missing ``sliding_window`` means none. The chosen experts' weights sum to 1."""
    reader = ConfigReader(config, "config.json of a mixtral model")
    for key in ("attention_bias", "mlp_bias"):
        reader.only(key, (False,))
    stored = reader.raw("sliding_window")
    window = None if stored is None else reader.integer("sliding_window")
    count, chosen = expert_counts(reader, 8, 2)
    experts = Experts(count, chosen, reader.integer("intermediate_size"), True, (True,) * layer_count(reader),
                      "block_sparse_moe", ("w1", "w3", "w2"))
    rope = parse_rope(reader, reader.integer("max_position_embeddings", POSITIONS), 1e6)
    return parse_dense(reader, "mixtral", windows=uniform_windows(reader, window), qkv_bias=False,
                       o_bias=False, kv_heads=8, max_positions=POSITIONS, eps=1e-5, rope=rope,
                       ignored=ROUTER_TRAINING, experts=experts)


ARCHITECTURE = Architecture("mixtral", ("MixtralForCausalLM",), parse)
