"""The keys that describe a model: named as the gguf library names them, and read back as the same model."""

from __future__ import annotations

import re

import gguf.constants
import numpy as np
import pytest

from quantkit.export.gguf.model_keys import model_keys
from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.forward_context import inverse_frequencies
from quantkit.models.rope_config import RopeConfig
from quantkit.sources.gguf_config import hf_config
from quantkit.sources.gguf_families import FAMILIES
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing.tiny import tiny_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0, 2.0, 3.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0]}
PARTIAL = {"partial_rotary_factor": 0.75, "rope_scaling": LONG, "original_max_position_embeddings": 512,
           "max_position_embeddings": 2048}
SIX = ["sliding_attention"] * 5 + ["full_attention"]
UNTIED = {"tie_word_embeddings": False}
PLAIN = {**UNTIED, "rope_scaling": {"rope_type": "default"}}
OSS_YARN = {**YARN, "truncate": False}
SAYABLE = [*((family, PLAIN if family == "gpt_oss" else {}) for family in (*FAMILIES, "mistral")),
           ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
           ("llama", {"rope_scaling": LLAMA3}),
           ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.25}}),
           ("qwen2", {"rope_scaling": YARN}), ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
           ("phi3", PARTIAL), ("phi3", {**PARTIAL, "rope_scaling": {**LONG, "attention_factor": 1.25}}),
           ("gemma2", {"num_hidden_layers": 3, "query_pre_attn_scalar": 16}),
           ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
           ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
           ("gemma3_text", {"num_hidden_layers": 6, "layer_types": SIX, "sliding_window_pattern": None}),
           ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})]
UNSAYABLE = [("mimo", {}, "mimo"), ("qwen3", {"attention_bias": True}, "qkv_bias"),
             ("qwen3_moe", {"norm_topk_prob": False}, "experts"),
             ("qwen3_moe", {"mlp_only_layers": [0]}, "experts"),
             ("qwen2", {"rope_scaling": LLAMA3}, "in llama models only"),
             ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "rope_freqs"),
             ("llama", {"rope_scaling": {**YARN, "truncate": False}}, "rope"),
             ("llama", {"rope_scaling": {**YARN, "beta_fast": 16.0}}, "ramp from 32 to 1"),
             ("qwen2", {"rope_scaling": {**YARN, "beta_slow": 2.0}}, "ramp from 32 to 1"),
             ("gpt_oss", {}, "a head of their own"), ("gpt_oss", {**PLAIN, "swiglu_limit": 5.0}, "limit"),
             ("gpt_oss", {**UNTIED, "attention_bias": False}, "qkv_bias"),
             ("gpt_oss", {**UNTIED, "rope_scaling": YARN}, "rope"),
             ("gemma2", {"query_pre_attn_scalar": 20}, "attention_scale"),
             ("gemma2", {"attn_logit_softcapping": None}, "attention_softcap"),
             ("gemma3_text", {"num_hidden_layers": 3, "layer_types": [
                 "full_attention", "full_attention", "sliding_attention"]}, "sliding_windows")]


def names(case) -> str:
    return "-".join([case[0], *(str(key) for key in case[1])])


def read(config, keys):
    """The model that the keys describe; floats as a file has them."""
    values = {key: float(np.float32(value)) if isinstance(value, float) else value
              for key, value in keys.values.items()}
    tables = {name: table.numpy() for name, table in keys.tables.items()}
    return parse_config(hf_config(values, tensor_shapes(config), tables, "m.gguf"))


@pytest.mark.parametrize(("family", "overrides"), SAYABLE, ids=map(names, SAYABLE))
def test_a_model_of_each_family(family, overrides):
    config = parse_config(tiny_config(family, **overrides))
    keys = model_keys(config)
    back = read(config, keys)
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "sliding_windows", "experts",
                  "attention_softcap", "logit_softcap", "tie_word_embeddings", "qk_norm", "qkv_bias"):
        assert getattr(back, field) == getattr(config, field), field
    assert back.rope.kind == config.rope.kind and keys.notes == ()
    assert back.rope.attention_factor == pytest.approx(config.rope.attention_factor)
    known = {value for group in vars(gguf.constants.Keys).values() if isinstance(group, type)
             for value in vars(group).values() if isinstance(value, str)}
    architecture = keys.values["general.architecture"]
    for key in keys.values:
        assert re.sub(rf"^{architecture}\.", "{arch}.", key) in known, key


@pytest.mark.parametrize(("family", "overrides", "words"), UNSAYABLE, ids=map(names, UNSAYABLE))
def test_what_has_no_key_is_an_error(family, overrides, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        model_keys(parse_config(tiny_config(family, **overrides)))
    assert caught.value.next


@pytest.mark.parametrize(("family", "overrides"), [
    ("mistral", {"sliding_window": 48}), ("phi3", {"sliding_window": 48}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1})])
def test_windows_that_llama_cpp_does_not_have_bound_the_context(family, overrides):
    keys = model_keys(parse_config(tiny_config(family, **overrides)))
    (note,) = keys.notes
    assert keys.values[f"{keys.family.architecture}.context_length"] == 48 and "48" in note


def test_yarn_whose_ramp_llama_cpp_rounds():
    config = parse_config(tiny_config("gpt_oss", **UNTIED, rope_scaling=OSS_YARN))
    keys = model_keys(config)
    (note,) = keys.notes
    assert "ends of yarn's ramp" in note and read(config, keys).rope == config.rope
    assert keys.values["gpt-oss.context_length"] == 512
    assert keys.values["gpt-oss.attention.sliding_window_pattern"] == 2


def test_a_window_as_long_as_the_context_is_none():
    assert not model_keys(parse_config(tiny_config("mistral", sliding_window=512))).notes


def test_llama3_scaling_is_a_table():
    config = parse_config(tiny_config("llama", rope_scaling=LLAMA3))
    (table,) = model_keys(config).tables.values()
    plain = inverse_frequencies(RopeConfig(config.rope.theta), 16, table.device)
    assert np.allclose(plain / table, inverse_frequencies(config.rope, 16, table.device))
    assert float(table.max()) == 8.0 and float(table[0]) == 1.0
