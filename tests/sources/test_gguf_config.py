from __future__ import annotations

import numpy as np
import pytest

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.synthetic import CONFIGS
from quantkit.sources.gguf_config import hf_config
from quantkit.support.errors import SourceError

LLAMA = {"block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
         "attention.head_count": 4, "attention.head_count_kv": 2,
         "attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "rope.freq_base": 10000.0,
         "rope.dimension_count": 16, "vocab_size": 100}
SHAPES = {"model.embed_tokens.weight": (100, 64)}


def config(arch: str = "llama", shapes=SHAPES, factors=None, *, drop=(), top=None, tables=None, **keys):
    given = {**LLAMA, **{key.replace("__", "."): value for key, value in keys.items()}}
    metadata = {f"{arch}.{key}": value for key, value in given.items() if key not in drop}
    tables = {**({} if factors is None else {"rope_freqs.weight": factors}), **(tables or {})}
    return hf_config({"general.architecture": arch, **metadata, **(top or {})}, shapes, tables, "x.gguf")


@pytest.mark.parametrize("arch,cls", [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"),
                                      ("qwen3", "Qwen3ForCausalLM"), ("gemma2", "Gemma2ForCausalLM")])
def test_says_what_the_metadata_says(arch, cls):
    found = config(arch, top={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 99})
    wanted = {"architectures": [cls], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
              "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000,
              "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 99}
    assert {key: found[key] for key in wanted} == wanted
    parse_config(found)  # strict about keys and values


def test_gemma_2():
    model = parse_config(config("gemma2", block_count=4, attn_logit_softcapping=20.0))
    assert model.sliding_windows == (4096, None, 4096, None)
    assert (model.attention_softcap, model.logit_softcap) == (20.0, 30.0)
    assert model.offset_norms and model.sandwich_norms and model.activation == "gelu_tanh"
    large = config("gemma2", block_count=46, attention__key_length=32, attention__value_length=32,
                   rope__dimension_count=32)
    assert large["query_pre_attn_scalar"] == 16 and config("gemma2")["query_pre_attn_scalar"] == 16


def gemma3(**keys):
    return config("gemma3", **{"block_count": 7, "attention__sliding_window": 32, **keys})


def test_gemma_3():
    model = parse_config(gemma3())
    assert model.sliding_windows == (32, 32, 32, 32, 32, None, 32)
    assert model.qk_norm and model.attention_scale is None and model.logit_softcap is None
    other = gemma3(rope__freq_base_swa=5e4, final_logit_softcapping=30.0, rope__scaling__type="linear",
                   rope__scaling__factor=8.0)
    assert other["rope_local_base_freq"] == 5e4 and other["final_logit_softcapping"] == 30.0
    assert other["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    parse_config(other)
    assert parse_config(gemma3(attention__sliding_window=0)).sliding_windows == (None,) * 7
    assert parse_config(config("gemma3")).sliding_windows == (None,) * 2


def gpt_oss(**keys):
    return config("gpt-oss", shapes={**SHAPES, "lm_head.weight": (100, 64)}, **{
        "block_count": 5, "attention__sliding_window": 32, "expert_count": 8, "expert_used_count": 3,
        "expert_feed_forward_length": 40, **keys})


def test_gpt_oss():
    model = parse_config(gpt_oss(drop=("feed_forward_length",)))
    assert model.sliding_windows == (32, None, 32, None, 32)
    assert (model.experts.count, model.experts.chosen, model.experts.intermediate_size) == (8, 3, 40)
    assert model.attention_sinks and model.qkv_bias and model.o_bias and model.activation_limit == 7.0
    assert model.rope.kind == "default" and not model.tie_word_embeddings
    assert parse_config(gpt_oss(attention__sliding_window_pattern=3)).sliding_windows[1:3] == (32, None)
    listed = gpt_oss(attention__sliding_window_pattern=[False, True, True, False, False])
    assert parse_config(listed).sliding_windows == (None, 32, 32, None, None)
    yarn = parse_config(gpt_oss(context_length=1024, rope__scaling__type="yarn", rope__scaling__factor=32.0,
                                rope__scaling__original_context_length=32)).rope
    assert (yarn.kind, yarn.factor, yarn.original_max_positions, yarn.truncate) == ("yarn", 32.0, 32, False)


@pytest.mark.parametrize("make", [gpt_oss, gemma3])
def test_layers_are_bounded_before_any_is_listed(make):
    with pytest.raises(SourceError, match=r"block_count is '2147483647'"):
        make(block_count=2**31 - 1)


def test_gpt_oss_20b():
    """As llama.cpp's converter writes it."""
    keys = {"block_count": 24, "context_length": 131072, "embedding_length": 2880,
            "feed_forward_length": 2880, "attention.head_count": 64, "attention.head_count_kv": 8,
            "rope.freq_base": 150000.0,
            "attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "attention.key_length": 64,
            "attention.value_length": 64, "expert_count": 32, "expert_used_count": 4,
            "attention.sliding_window": 128, "expert_feed_forward_length": 2880, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
    metadata = {"general.architecture": "gpt-oss", **{f"gpt-oss.{key}": value for key, value in keys.items()}}
    published = CONFIGS["gpt-oss-20b"]
    model = parse_config(hf_config(metadata, tensor_shapes(parse_config(published)), {}, "x.gguf"))
    assert model == parse_config(published)


@pytest.mark.parametrize("keys", [
    {"drop": ("expert_feed_forward_length",)}, {"expert_feed_forward_length": 0},
    {"attention__sliding_window": 0}, {"drop": ("attention__sliding_window",)}, {"expert_used_count": 0},
    {"attention__sliding_window_pattern": [True] * 4}, {"rope__freq_base_swa": 5e4}])
def test_gpt_oss_without_what_it_needs(keys):
    if "drop" in keys:
        keys = {"drop": tuple(key.replace("__", ".") for key in keys["drop"])}
    with pytest.raises(SourceError):
        gpt_oss(**keys)


@pytest.mark.parametrize(("pattern", "full"), [(3, (2, 5)), ([True] * 4 + [False] * 3, (4, 5, 6)),
                                               ([False] * 7, range(7))])
def test_layers_with_a_window(pattern, full):
    windows = parse_config(gemma3(attention__sliding_window_pattern=pattern)).sliding_windows
    assert windows == tuple(None if layer in full else 32 for layer in range(7))


@pytest.mark.parametrize("pattern", [[True] * 6, [1] * 7, "x", 0, [True, 2]])
def test_a_pattern_that_is_none(pattern):
    with pytest.raises(SourceError, match="sliding_window_pattern"):
        gemma3(attention__sliding_window_pattern=pattern)


def test_what_the_tensors_say():
    assert not config(shapes={**SHAPES, "lm_head.weight": (100, 64)})["tie_word_embeddings"]
    assert config(shapes={**SHAPES, "model.layers.0.self_attn.q_proj.bias": (64,)})["attention_bias"]
    assert config(shapes={"model.embed_tokens.weight": (128, 64)})["vocab_size"] == 128


def test_defaults():
    found = config(drop=("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"))
    assert (found["num_key_value_heads"], found["rope_theta"], found["head_dim"]) == (4, 10000, 16)
    wide = config("qwen3", attention__key_length=32, attention__value_length=32, rope__dimension_count=32)
    assert wide["head_dim"] == 32
    assert config(attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    assert "bos_token_id" not in config(top={"tokenizer.ggml.bos_token_id": 100})  # no such row


@pytest.mark.parametrize("change,what", [
    ({"attention__head_count": 0}, "head_count"), ({"attention__head_count": "4"}, "head_count"),
    ({"attention__head_count": True}, "head_count"), ({"block_count": 2**40}, "block_count"),
    ({"attention__head_count": 5}, "doesn't divide"),
    ({"attention__head_count_kv": [2, 4]}, "layers that differ"),
    ({"feed_forward_length": []}, "layers that differ"), ({"context_length": -1}, "context_length"),
    ({"attention__layer_norm_rms_epsilon": 0.0}, "epsilon"), ({"rope__freq_base": float("nan")}, "freq_base"),
    ({"rope__freq_base": float("inf")}, "freq_base"), ({"rope__freq_base": "x"}, "freq_base"),
    ({"rope__dimension_count": 8}, "all 16 dimensions"), ({"attention__value_length": 8}, "one width"),
    ({"attention__causal": False}, "causal"), ({"attention__sliding_window": 64}, "sliding_window"),
    ({"expert_count": -1}, "expert_count"), ({"expert_count": True}, "expert_count"),
    ({"expert_count": 8}, "expert_used_count"), ({"arch": "qwen2", "expert_count": 8}, "no experts here"),
    ({"arch": "qwen3moe", "expert_used_count": 2}, "expert_count"),
    ({"arch": "qwen3moe", "expert_count": 8}, "expert_used_count"),
    ({"logit_scale": 2.0}, "llama.logit_scale"),
    ({"rope__scaling__type": "dynamic"}, "'dynamic'"), ({"rope__scaling__type": 3}, "scaling.type"),
    ({"rope__scaling__type": "longrope"}, "LongRoPE"), ({"rope__scaling__attn_factor": 2.0}, "attn_factor"),
    ({"rope__scaling__yarn_beta_fast": 16.0}, "yarn_beta_fast"), ({"rope__scaling__alpha": 2.0}, "alpha"),
    ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ({"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ({"rope__scaling__type": "yarn", "factors": np.ones(8, np.float32)}, "a table"),
    ({"arch": "phi3", "rope__scaling__type": "yarn"}, "LongRoPE, or not"),
    ({"arch": "phi3", "rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, "LongRoPE, or not"),
    ({"arch": "phi3", "factors": np.ones(8, np.float32)}, "LongRoPE, or not"),
    ({"arch": "phi3", "rope__dimension_count": 20}, "a head's 16"),
    ({"arch": "phi3", "rope__dimension_count": 7}, "a head's 16"),
    ({"arch": "phi3", "attention__sliding_window": -1}, "sliding_window"),
])
def test_what_would_change_the_maths_is_refused(change, what):
    with pytest.raises(SourceError, match=what) as caught:
        config(**change)
    assert "x.gguf" in caught.value.what and caught.value.next


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length",
                                 "feed_forward_length", "attention.layer_norm_rms_epsilon"])
def test_a_needed_key_is_missing(key):
    with pytest.raises(SourceError, match=key):
        config(drop=(key,))


@pytest.mark.parametrize("arch", ["qwen", "phi2", "", None, 3, ["llama"]])
def test_an_unknown_architecture(arch):
    with pytest.raises(SourceError, match=r"holds a .* model") as caught:
        hf_config({"general.architecture": arch}, SHAPES, {}, "x.gguf")
    assert "llama, phi3, qwen2, qwen3, qwen3moe" in (caught.value.why or "")


def test_no_embedding():
    for shapes in ({}, {"model.embed_tokens.weight": (100,)}):
        with pytest.raises(SourceError, match="token_embd"):
            config(shapes=shapes)


def test_linear_rope_scaling():
    for keys in ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
                 {"rope__scaling__factor": 4.0},
                 {"rope__scale_linear": 4.0}):
        found = config(**keys)
        assert found["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        assert parse_config(found).rope.factor == 4.0
    for keys in ({"rope__scaling__type": "none"},
                 {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
                 {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}):
        assert "rope_scaling" not in config(**keys)


def test_yarn():
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 32}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config("qwen2", **keys)["rope_scaling"] == scaling
    rope = parse_config(config("qwen2", **keys)).rope
    assert (rope.kind, rope.beta_fast, rope.attention_factor) == ("yarn", 32.0, 0.1 * np.log(4.0) + 1)
    hf = config(**keys, rope__scaling__yarn_ext_factor=1.0, rope__scaling__yarn_beta_fast=24.0,
                   rope__scaling__yarn_beta_slow=float(np.float32(1.2)),
                   rope__scaling__yarn_attn_factor=float(np.float32(0.9)))
    assert hf["rope_scaling"] == {**scaling, "beta_fast": 24.0, "beta_slow": 1.2, "attention_factor": 0.9}
    parse_config(hf)


def longrope(count: int = 6, **keys):
    tables = {f"rope_factors_{reach}.weight": np.linspace(1, end, count, dtype=np.float32)
              for reach, end in (("short", 1.5), ("long", 9.0))}
    given = {"rope__scaling__type": "longrope", "rope__scaling__original_context_length": 32,
             "rope__scaling__attn_factor": float(np.float32(np.sqrt(1.4))), "rope__dimension_count": 12,
             "tables": tables, **keys}
    return config("phi3", **given)


def test_longrope():
    hf = longrope()
    assert (hf["partial_rotary_factor"], hf["original_max_position_embeddings"]) == (0.75, 32)
    assert set(hf["rope_scaling"]) == {"rope_type", "short_factor", "long_factor"}  # the usual magnitude
    rope = parse_config(hf).rope
    assert (rope.kind, rope.long_factors[-1], rope.short_factors[-1]) == ("longrope", 9.0, 1.5)
    assert rope.attention_factor == pytest.approx(np.sqrt(1.4))
    assert parse_config(longrope(rope__scaling__attn_factor=2.0)).rope.attention_factor == 2.0
    assert parse_config(longrope(rope__scaling__attn_factor=None)).rope.attention_factor == 1.0
    # older files have the tables alone, and llama.cpp goes by these
    assert longrope(rope__scaling__type=None) == hf


@pytest.mark.parametrize(("keys", "what"), [
    ({"tables": None}, "no rope_factors_short"), ({"count": 5}, "a useless rope_factors_short"),
    ({"tables": {"rope_factors_short.weight": np.ones(6, np.float32)}}, "no rope_factors_long"),
    ({"tables": {"rope_factors_short.weight": np.ones(6, np.float32),
                 "rope_factors_long.weight": np.full(6, np.nan, np.float32)}}, "a useless rope_factors_long"),
    ({"rope__scaling__attn_factor": -1.0}, "attn_factor"), ({"rope__scaling__type": "none"}, None)])
def test_longrope_that_is_none(keys, what):
    if what is None:
        assert longrope(**keys) == longrope()
        return
    with pytest.raises(SourceError, match=what):
        longrope(**keys)


@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (128, 96), (96, 2), (80, 32), (98, 58), (200, 74)])
def test_the_share_of_a_head_gives_the_same_dimensions_again(dim, rotated):
    hf = config("phi3", attention__key_length=dim, attention__value_length=dim,
                   rope__dimension_count=rotated)
    assert parse_config(hf).rope.rotated(dim) == rotated
    assert ("partial_rotary_factor" in hf) is (rotated != dim)


def test_phi_3():
    hf = config("phi3", attention__sliding_window=64)
    assert hf["architectures"] == ["Phi3ForCausalLM"] and "rope_scaling" not in hf
    assert parse_config(hf).sliding_windows == (64, 64)
    assert parse_config(config("phi3", attention__sliding_window=0)).sliding_windows == (None, None)


def test_mixtures_of_experts():
    mixtral = parse_config(config(expert_count=8, expert_used_count=2))
    assert (mixtral.model_type, mixtral.experts.count, mixtral.experts.chosen) == ("mixtral", 8, 2)
    assert mixtral.experts.intermediate_size == 96 and mixtral.rope.theta == 10000.0
    keys = {"expert_count": 8, "expert_used_count": 2}
    qwen = parse_config(config("qwen3moe", **keys, expert_feed_forward_length=24))
    assert (qwen.experts.intermediate_size, qwen.experts.normalized) == (24, True)
    assert config("qwen3moe", **keys)["moe_intermediate_size"] == 48


def llama3_table(theta: float, dim: int, factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """As llama.cpp's converter writes it: a loop over frequencies."""
    table = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        smooth = (8192 / wavelength - low) / (high - low)
        inside = 1 / ((1 - smooth) / factor + smooth)
        table.append(1.0 if wavelength < 8192 / high else factor if wavelength > 8192 / low else inside)
    return np.array(table, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_are_recognised(factor):
    found = config(factors=llama3_table(500000.0, 16, factor), rope__freq_base=500000.0)
    assert found["rope_scaling"] == {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("table", [
    llama3_table(500000.0, 16, 8.0, high=8.0), llama3_table(10000.0, 16, 8.0), np.ones(4, np.float32),
    np.full(8, np.nan, np.float32), np.zeros(8, np.float32), np.full(8, np.inf, np.float32),
    np.array([5, 1, 1, 1, 1, 1, 1, 8], np.float32),
])
def test_other_rope_factors_are_refused(table):
    with pytest.raises(SourceError, match="rope_freqs"):
        config(factors=table, rope__freq_base=500000.0)


def test_llama3_factors_and_transformers_agree():
    transformers = pytest.importorskip("transformers")
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = config(factors=llama3_table(500000.0, 16, 8.0), rope__freq_base=500000.0)
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**found), torch.device("cpu"))
    np.testing.assert_allclose(theirs.numpy(), plain / llama3_table(500000.0, 16, 8.0), rtol=1e-5)
