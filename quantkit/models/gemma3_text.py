"""Gemma 3's text model, https://arxiv.org/abs/2503.19786: Gemma 2's layers, normalized queries and keys in
place of capped scores, five layers with a window and a rope of their own to each without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig
from quantkit.models.gemma2 import parse_gemma
from quantkit.models.reader import ConfigReader
from quantkit.models.rope_config import RopeConfig, parse_rope

DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8}
"""Published configs leave these out."""
POSITIONS = 131_072
THETA, LOCAL_THETA = 1e6, 1e4


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Every ``sliding_window_pattern``-th layer sees everything and has the global rope."""
    config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(config, "config.json of a gemma3_text model")
    reader.only("attn_logit_softcapping", ())
    rope, local = _ropes(reader, reader.integer("max_position_embeddings", POSITIONS))
    period = reader.integer("_sliding_window_pattern", 6)  # how transformers writes it
    cap = reader.raw("final_logit_softcapping")
    return parse_gemma(reader, "gemma3_text", period=reader.integer("sliding_window_pattern", period),
                       positions=POSITIONS, attention_cap=None, qk_norm=True, rope=rope, local_rope=local,
                       logit_cap=None if cap is None else reader.number("final_logit_softcapping"))


def _ropes(reader: ConfigReader, positions: int) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers without a window, and of those with one, in the spelling of transformers 4 or 5."""
    tables, local = reader.raw("rope_parameters"), reader.raw("rope_local_base_freq")
    if tables is None:
        theta = reader.number("rope_local_base_freq", LOCAL_THETA)
        return parse_rope(reader, positions, THETA), RopeConfig(theta)
    reader.only("rope_scaling", ())
    kinds = {"full_attention": (reader.raw("rope_theta"), THETA), "sliding_attention": (local, LOCAL_THETA)}
    if not isinstance(tables, dict) or not set(tables) <= set(kinds):
        raise reader.wrong("rope_parameters", tables, f"it must have a table each for {' and '.join(kinds)}")
    full, sliding = (
        parse_rope(ConfigReader({"rope_parameters": tables.get(kind), "rope_theta": theta},
                                f"{reader.where}, {kind}"), positions, default)
        for kind, (theta, default) in kinds.items())
    return full, sliding


ARCHITECTURE = Architecture("gemma3_text", ("Gemma3ForCausalLM",), parse)
