"""Configs of Phi-3, Mixtral, Qwen3-MoE and Gemma: what is read, and that all else is an error."""

from __future__ import annotations

import pytest

from quantkit.models.architecture import linear_slots, parse_config
from quantkit.support.errors import UnsupportedModelError

NEW = ("gemma2", "gemma3_text", "mixtral", "phi3", "qwen3_moe")


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(("key", "value"), [
    ("hidden_act", "relu"), ("rope_interleaved", True), ("pretraining_tp", 2), ("attention_multiplier", 0.1),
    ("logits_scaling", 8.0), ("embedding_multiplier", 12.0), ("mlp_bias", True), ("no_rope_layers", [1, 0]),
    ("is_encoder_decoder", True), ("rope_scaling", {"type": "mystery", "factor": 2.0}),
    ("num_experts_shared", 1), ("use_bidirectional_attention", True), ("vocab_size", 0),
    ("layer_types", ["linear_attention"] * 2), ("layer_types", ["sliding_attention"]),
    ("num_key_value_heads", 3), ("head_dim", 15), ("rms_norm_eps", 0.0), ("max_position_embeddings", 1.5),
    ("rope_scaling", {"type": "linear", "factor": 2.0, "surprise": 1}), ("sliding_window", 0),
])
def test_what_changes_the_maths_is_an_error(make_config, family, key, value):
    keys = {key: value, "use_sliding_window": True} if family == "qwen3_moe" else {key: value}
    with pytest.raises(UnsupportedModelError, match=key if key != "rope_scaling" else "type|linear|surprise"):
        parse_config(make_config(family, **keys))


@pytest.mark.parametrize(("family", "keys", "named"), [
    ("phi3", {"attention_bias": True}, "attention_bias"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
    ("phi3", {"interpolate_factor": 2}, "interpolate_factor"),
    ("gemma2", {"sliding_window_size": 25}, "sliding_window_size"),
    ("phi3", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar"),
    ("mixtral", {"attention_bias": True}, "attention_bias"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("mixtral", {"num_experts": 8}, "num_experts"),
    ("mixtral", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
     "max_window_layers"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
    ("gemma2", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "rope_parameters"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_theta"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {}}, "rope_scaling": {
        "rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
])
def test_a_familys_own_keys(make_config, family, keys, named):
    with pytest.raises(UnsupportedModelError, match=named):
        parse_config(make_config(family, **keys))


def test_what_concerns_training_only_is_taken(make_config):
    plain = make_config("mixtral")
    assert parse_config(plain | {"output_router_logits": True, "router_aux_loss_coef": 0.02,
                                 "router_jitter_noise": 0.1}) == parse_config(plain)


def test_which_layers_have_experts(make_config):
    def routed(**keys):
        experts = parse_config(make_config("qwen3_moe", num_hidden_layers=5, **keys)).experts
        return experts and experts.layers

    assert routed() == (True,) * 5
    assert routed(decoder_sparse_step=2) == (False, True, False, True, False)
    assert routed(mlp_only_layers=[0, 3]) == (False, True, True, False, True)
    assert routed(decoder_sparse_step=6) is None
    config = parse_config(make_config("qwen3_moe", mlp_only_layers=[0]))
    names = [slot.name for slot in linear_slots(config)]
    assert "model.layers.0.mlp.up_proj" in names and "model.layers.1.mlp.up_proj" not in names
    assert "model.layers.1.mlp.experts.5.up_proj" in names
    assert not any(name.endswith(".gate") for name in names)


def test_gemmas_windows_and_ropes(make_config):
    two = parse_config(make_config("gemma2", num_hidden_layers=4))
    assert two.sliding_windows == (24, None, 24, None) and two.local_rope is None
    keys = {"sliding_window_pattern": None, "rope_theta": None, "rope_local_base_freq": None}
    three = parse_config(make_config("gemma3_text", num_hidden_layers=7, **keys))
    assert three.sliding_windows == (*[24] * 5, None, 24)
    assert (three.rope.theta, three.local_rope.theta) == (1e6, 1e4)
    assert three.embedding_scale == 8.0 and three.attention_scale is None
    assert parse_config(make_config("gemma2", query_pre_attn_scalar=64)).attention_scale == 0.125


def test_gemma3_4b_leaves_out_most_of_its_config():
    """As published."""
    config = parse_config({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                           "num_hidden_layers": 34, "sliding_window": 1024,
                           "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.local_rope.kind == "default" and config.tie_word_embeddings
    assert config.sliding_windows.count(None) == 5 and config.max_position_embeddings == 131072


def test_keys_of_published_configs_that_say_nothing_new(make_config):
    for family, keys in (("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
                                   "embd_pdrop": 0.0, "original_max_position_embeddings": 4096}),
                         ("gemma2", {"sliding_window_size": 24, "cache_implementation": "hybrid"}),
                         ("gemma3_text", {"cache_implementation": "hybrid", "attn_logit_softcapping": None}),
                         ("qwen3_moe", {"max_window_layers": 48, "output_router_logits": False})):
        assert parse_config(make_config(family, **keys)) == parse_config(make_config(family))
