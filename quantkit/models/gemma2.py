"""Gemma 2, https://arxiv.org/abs/2408.00118: norms on both sides, capped scores, windows by turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import ModelConfig, parse_dense, periodic_windows
from quantkit.models.reader import ConfigReader

HEAD_DIM = 256


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Every second layer, from the first on, has a window. A missing cap has a value, null is none."""
    reader = ConfigReader(config, "config.json of a gemma2 model")
    caps = [reader.number(key, default) if config.get(key, default) is not None else None
            for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))]
    return parse_gemma(reader, "gemma2", period=2, positions=8192, attention_cap=caps[0], logit_cap=caps[1])


def parse_gemma(reader: ConfigReader, model_type: str, *, period: int, positions: int,
                attention_cap: float | None, logit_cap: float | None, **differences: Any) -> ModelConfig:
    """What Gemma 2 and 3 share.

    Args:
        reader: of the config.
        model_type: the family.
        period: every ``period``-th layer has no window, unless ``layer_types`` says otherwise.
        positions: where ``max_position_embeddings`` is missing.
        attention_cap, logit_cap: of scores and logits.
        differences: for :func:`~quantkit.models.config.parse_dense`.

    Raises:
        UnsupportedModelError: as parse_dense.
    """
    for key in ("hidden_act", "hidden_activation"):
        reader.only(key, ("gelu_pytorch_tanh",))
    reader.only("use_bidirectional_attention", (False,))
    reader.only("mlp_bias", (False,))
    bias, window = reader.flag("attention_bias"), reader.integer("sliding_window", 4096)
    reader.only("sliding_window_size", (window,))  # its older name, beside the new one
    scalar, dim = reader.number("query_pre_attn_scalar", 256), reader.integer("head_dim", HEAD_DIM)
    return parse_dense(
        reader, model_type, windows=periodic_windows(reader, window, period), qkv_bias=bias, o_bias=bias,
        kv_heads=4, max_positions=positions, head_dim=HEAD_DIM, tied=True, ignored=("cache_implementation",),
        activation="gelu_tanh", sandwich_norms=True, offset_norms=True,
        embedding_scale=reader.integer("hidden_size")**0.5,
        attention_scale=None if scalar == dim else scalar**-0.5, attention_softcap=attention_cap,
        logit_softcap=logit_cap, **differences)


ARCHITECTURE = Architecture("gemma2", ("Gemma2ForCausalLM",), parse)
