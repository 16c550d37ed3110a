"""Random tiny models of transformers, float32: the same logits at every position."""

from __future__ import annotations

import warnings

import pytest
import torch

from quantkit.sources.open import open_source

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")

BOUND = 1e-4
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}


def factors(count):
    """longrope's, for so many pairs of dimensions."""
    return {"short_factor": [1 + 0.1 * i for i in range(count)],
            "long_factor": [2 + 1.5 * i for i in range(count)]}


CASES = {
    "gemma2": ("gemma2", {"sliding_window": 5}),
    "gemma2-27b-like": ("gemma2", {"query_pre_attn_scalar": 24, "num_key_value_heads": 4, "head_dim": 32,
                                   "tie_word_embeddings": False, "sliding_window": 5}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None,
                                  "attention_bias": True}),
    "gemma2-layer-types": ("gemma2", {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "num_hidden_layers": 3}),
    "gemma3-linear": ("gemma3_text", {"sliding_window": 5, "rope_scaling": {
        "rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 24, "rope_local_base_freq": 500.0}),
    "gemma3-v5": ("gemma3_text", {"sliding_window": 6, "final_logit_softcapping": 8.0,
                                  "attention_bias": True, "rope_theta": None, "rope_local_base_freq": None,
                                  "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 5}),
    "gpt-oss-defaults": ("gpt_oss", {"sliding_window": 6, "rope_scaling": None, "swiglu_limit": 0.6,
                                     "num_local_experts": 5, "num_experts_per_tok": 3,
                                     "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gpt-oss-layer-types": ("gpt_oss", {"sliding_window": 7, "num_hidden_layers": 3, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"], "attention_bias": False,
        "num_experts_per_tok": 1, "rope_scaling": None, "rope_theta": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 700.0}}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "internlm3-untied": ("internlm3", {"tie_word_embeddings": False, "head_dim": 24, "rope_scaling": {
        "rope_type": "dynamic", "factor": 6.0}}),
    "iquestcoder": ("iquestcoder", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-untied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-rope-llama3": ("llama", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama-rope-llama3-v5": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama-rope-yarn": ("llama", {"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", **YARN}}),
    "llama-rope-yarn-fine": ("llama", {"rope_theta": 100.0, "rope_scaling": {
        "rope_type": "yarn", **YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.8,
        "mscale_all_dim": 0.5}}),
    "ministral": ("ministral", {"sliding_window": 5}),
    "ministral-layer-types": ("ministral", {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"], "tie_word_embeddings": False}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 5, "tie_word_embeddings": False, "head_dim": 32}),
    "mixtral": ("mixtral", {}),
    "mixtral-window-untied": ("mixtral", {"sliding_window": 5, "tie_word_embeddings": False, "head_dim": 24,
                                          "num_experts_per_tok": 3}),
    "mixtral-one": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "phi3": ("phi3", {}),
    "phi3-window-untied": ("phi3", {"sliding_window": 5, "tie_word_embeddings": False,
                                    "num_key_value_heads": 4}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-longrope-short": ("phi3", {"original_max_position_embeddings": 64, "rope_scaling": {
        "type": "longrope", **factors(8)}}),
    "phi3-longrope-partial": ("phi3", {"original_max_position_embeddings": 60, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 60, "factor": 8.0, "attention_factor": 1.2, **factors(6)}}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2-layer-types": ("qwen2", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": {"type": "yarn", **YARN}, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-untied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-some-layers": ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0],
                                            "norm_topk_prob": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-own-weights": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 4}),
    "qwen3-moe-some-layers": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2,
                                            "mlp_only_layers": [3], "tie_word_embeddings": False}),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6,
                                       "attention_bias": True}),
    "qwen3-window": ("qwen3", {**WINDOW, "max_window_layers": 0, "head_dim": 16}),
}


@pytest.fixture(params=CASES, ids=str)
def pair(request, make_config, make_model, tmp_path):
    """transformers' model with random weights of every kind, and ours from what it saves."""
    family, keys = CASES[request.param]
    config = make_config(family, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = {key: value for key, value in config.items() if key != "torch_dtype"}
        hf_config = transformers.AutoConfig.for_model(**keys)
        hf = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager",
                                                           dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(1)
    for name, value in hf.named_parameters():
        noise = torch.randn(value.shape, generator=random)
        value.data = 1 + 0.2 * noise if "norm" in name else noise * (
            1.0 if "sinks" in name else 0.2 if value.dim() == 1 else 1.3 * value.shape[-1] ** -0.5)
    hf.save_pretrained(tmp_path)  # in memory experts are one tensor
    source = open_source(str(tmp_path))
    return hf, make_model(config, {name: source.tensor(name).clone() for name in source.tensors()})


def ids_of(batch, length, seed=2):
    return torch.randint(0, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


def difference(a, b):
    return (a - b).abs().max().item()


@pytest.mark.sampled(2)
def test_prefill(pair):
    hf, ours = pair
    ids = ids_of(2, 40)
    expected = hf(ids).logits
    assert expected.std() > 0.5, "logits too flat to tell models apart"
    assert difference(ours(ids), expected) <= BOUND


@pytest.mark.sampled(3)
def test_prefill_in_chunks_then_token_by_token(pair, fed):
    hf, ours = pair
    ids = ids_of(2, 30)
    cached = fed(ours, 2)
    got, start = [], 0
    for size in (9, 8, 1, 1, 5, *[1] * 6):
        got.append(cached(ids[:, start:start + size]))
        start += size
    assert difference(torch.cat(got, 1), hf(ids).logits) <= BOUND


@pytest.mark.sampled(3)
def test_a_right_padded_batch(pair, fed):
    hf, ours = pair
    ids, lengths = ids_of(3, 14), [14, 6, 1]
    positions = torch.arange(14).expand(3, 14).clone()
    for row, length in enumerate(lengths):
        positions[row, length:] = -1
    cached = fed(ours, 3)
    first = cached(ids, positions)
    more = ids_of(3, 4, seed=3)
    later = torch.cat([cached(more[:, t:t + 1]) for t in range(4)], 1)
    for row, length in enumerate(lengths):
        alone = hf(torch.cat((ids[row:row + 1, :length], more[row:row + 1]), 1)).logits[0]
        assert difference(torch.cat((first[row, :length], later[row])), alone) <= BOUND


def test_saved_configs_of_transformers_parse(pair):
    """What transformers itself writes today reads as what we were given."""
    from quantkit.models.architecture import parse_config

    hf, ours = pair
    written = hf.config.to_dict() | {"architectures": [type(hf).__name__]}
    assert parse_config(written) == ours.config
