"""A config key is used, harmless, or an error that names it."""

from __future__ import annotations

import pytest

from quantkit.models.architecture import parse_config
from quantkit.support.errors import UnsupportedModelError

ALL = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", ALL)
def test_every_field_is_read(make_config, family):
    config = parse_config(make_config(family, num_hidden_layers=3, rms_norm_eps=3e-6, head_dim=24))
    assert (config.model_type, config.num_layers, config.head_dim) == (family, 3, 24)
    assert (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads) == (
        64, 128, 4, 2)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.vocab_size) == (3e-6, True, 300)
    assert config.sliding_windows == (None,) * 3
    assert config.qk_norm == (family == "qwen3")
    assert config.qkv_bias == (family == "qwen2") and not config.o_bias and not config.mlp_bias


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("key", "value"), [
    ("hidden_act", "gelu"), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0),
    ("partial_rotary_factor", 0.5), ("rope_interleaved", True), ("pretraining_tp", 2),
    ("num_local_experts", 8), ("query_pre_attn_scalar", 144), ("is_encoder_decoder", True),
    ("attention_multiplier", 0.1), ("logits_scaling", 8.0), ("mlp_bias", "yes"), ("no_rope_layers", [1, 0]),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}),
    ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
    ("rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}),
    ("rope_scaling", {"type": "linear", "rope_type": "llama3", "factor": 2.0}),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": float("nan")}),
    ("rope_scaling", [1]),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5000.0}),
    ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
])
def test_what_changes_the_maths_is_an_error(make_config, family, key, value):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(make_config(family, **{key: value}))
    shown = str(caught.value)
    keys = {key, *value} if isinstance(value, dict) else {key}
    assert any(k in shown for k in keys) or "rope_theta" in shown
    assert caught.value.next


@pytest.mark.parametrize(("key", "value"), [
    ("num_attention_heads", 0), ("hidden_size", "64"), ("vocab_size", True), ("num_hidden_layers", 10**9),
    ("num_key_value_heads", 3), ("head_dim", 15), ("rms_norm_eps", 0.0), ("rms_norm_eps", 10**400),
    ("rope_theta", -1), ("tie_word_embeddings", "false"), ("layer_types", ["linear_attention"] * 2),
    ("layer_types", "full_attention"), ("max_position_embeddings", 1.5), ("intermediate_size", None),
])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_malformed_values_are_named(make_config, family, key, value):
    with pytest.raises(UnsupportedModelError, match=key):
        parse_config(make_config(family, **{key: value}))


def test_the_nearest_known_key_is_suggested(make_config):
    with pytest.raises(UnsupportedModelError, match="did you mean 'rms_norm_eps'"):
        parse_config(make_config("llama", rms_norm_epsilon=1e-5))


def test_a_missing_key_suggests_the_one_that_was_probably_meant(make_config):
    config = make_config("llama", num_hidden_layer=2)
    del config["num_hidden_layers"]
    with pytest.raises(UnsupportedModelError, match=r"'num_hidden_layers' is missing\n.*num_hidden_layer"):
        parse_config(config)


def test_harmless_keys_and_nulls_are_taken(make_config):
    plain = make_config("llama")
    noisy = plain | {"auto_map": {"AutoModel": "evil.Model"}, "transformers_version": "4.1",
                     "dtype": "float16", "attention_dropout": 0.5, "quantization_config": {"x": 1},
                     "initializer_range": 0.1,
                     "pretraining_tp": 1, "eos_token_id": [1, 2], "use_cache": False, "hidden_act": "silu",
                     "final_logit_softcapping": None, "rope_scaling": None, "head_dim": None,
                     "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}
    assert parse_config(noisy) == parse_config(plain)


def test_both_spellings_of_rope_mean_the_same(make_config):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}
    old = make_config("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    new = make_config("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    del new["rope_theta"]
    parsed = parse_config(new).rope
    assert parsed == parse_config(old).rope
    assert (parsed.kind, parsed.theta, parsed.factor) == ("llama3", 5e5, 8.0)
    assert parsed.original_max_positions == 64


def test_yarn_infers_what_is_left_out(make_config):
    rope = parse_config(make_config("qwen2", rope_scaling={
        "type": "yarn", "factor": None, "original_max_position_embeddings": 128})).rope
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx(1.1386294361)


def test_mistral_windows(make_config):
    config = make_config("mistral", sliding_window=9)
    assert parse_config(config).sliding_windows == (9, 9)
    del config["sliding_window"]
    assert parse_config(config).sliding_windows == (4096, 4096)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        parse_config(config | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(make_config, family):
    def windows(**keys):
        return parse_config(make_config(family, num_hidden_layers=3, **keys)).sliding_windows

    on = {"use_sliding_window": True, "sliding_window": 7}
    assert windows(sliding_window=7, max_window_layers=0) == (None, None, None)
    assert windows(**on, max_window_layers=2) == (None, None, 7)
    assert windows(use_sliding_window=True, sliding_window=None, max_window_layers=0) == (None,) * 3
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**on, layer_types=mixed) == (7, None, 7)
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        windows(sliding_window=7, layer_types=mixed)
    with pytest.raises(UnsupportedModelError, match="must list 3"):
        windows(**on, layer_types=mixed[:2])


def test_biases(make_config):
    llama = parse_config(make_config("llama", attention_bias=True, mlp_bias=True))
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias
    qwen3 = parse_config(make_config("qwen3", attention_bias=True))
    assert qwen3.qkv_bias and qwen3.o_bias and not qwen3.mlp_bias
    with pytest.raises(UnsupportedModelError, match="attention_bias"):
        parse_config(make_config("mistral", attention_bias=True))
    with pytest.raises(UnsupportedModelError, match="attention_bias"):
        parse_config(make_config("qwen2", attention_bias=False))
