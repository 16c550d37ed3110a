"""Which synthetic models there are: published configs of every family, a tiny one each, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
          "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
            "torch_dtype": "bfloat16", "num_experts_per_tok": 2, "sliding_window": None,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
              "torch_dtype": "bfloat16", "attention_bias": False, "norm_topk_prob": True,
              "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
              "sliding_window": None, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
_PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu",
         "torch_dtype": "bfloat16", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16", "attention_bias": False,
          "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_theta": 10000.0,
           "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
_GEMMA3 = {**_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_theta": 1e6,
           "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
            "torch_dtype": "bfloat16", "attention_bias": True, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "truncate": False, "original_max_position_embeddings": 4096}}
_GPT_OSS_20B = {**_GPT_OSS, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
                "num_local_experts": 32, "max_position_embeddings": 131072, "sliding_window": 128}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
_LLAMA_8B = {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
             "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
             "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_8B,
    "llama-3.1-8b": {**_LLAMA_8B, "max_position_embeddings": 131072,
                     "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "llama-1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                 "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                 "rope_theta": 500000.0, "tie_word_embeddings": True,
                 "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "phi3-mini": {**_PHI3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
                  "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                  "sliding_window": 2047, "rope_scaling": None, "tie_word_embeddings": False},
    "phi4-mini": {**_PHI3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
                  "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
                  "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                  "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
                  "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                                   "long_factor": [1.0 + i for i in range(48)]}},
    "mixtral-8x7b": {**_MIXTRAL, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
                     "num_local_experts": 8, "max_position_embeddings": 32768},
    "qwen3-30b-a3b": {**_QWEN3_MOE, "hidden_size": 2048, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
                      "num_experts_per_tok": 8, "max_position_embeddings": 40960, "max_window_layers": 48},
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": {**_GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128},
    "gemma2-2b": {**_GEMMA2, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
                  "max_position_embeddings": 8192, "sliding_window": 4096},
    "gemma3-1b": {**_GEMMA3, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                  "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
                  "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6},
    "tiny": {**_LLAMA, **_TINY},
    "tiny-phi3": {**_PHI3, **_TINY},
    "tiny-mixtral": {**_MIXTRAL, **_TINY, "num_local_experts": 4},
    "tiny-qwen3-moe": {**_QWEN3_MOE, **_TINY, "moe_intermediate_size": 64, "num_experts": 8,
                       "num_experts_per_tok": 2},
    "tiny-gpt-oss": {**_GPT_OSS, **_TINY, "num_local_experts": 8, "sliding_window": 32},
    "tiny-gemma2": {**_GEMMA2, **_TINY, "sliding_window": 32, "tie_word_embeddings": True},
    "tiny-gemma3": {**_GEMMA3, **_TINY, "sliding_window": 32, "sliding_window_pattern": 2,
                    "tie_word_embeddings": True},
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its Hugging Face name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        parts = (*_attention(config), *_mlp(config), *_norms(config))
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts}
        if config["model_type"] == "gpt_oss":
            shapes |= {f"model.layers.{i}.{name}.bias": shape[:1] for name, shape in parts if len(shape) == 2}
            shapes[f"model.layers.{i}.self_attn.sinks"] = (config["num_attention_heads"],)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


_Parts = Iterator[tuple[str, tuple[int, ...]]]


def _attention(config: Mapping[str, Any]) -> _Parts:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    if config["model_type"] == "phi3":
        yield "self_attn.qkv_proj", (q + 2 * kv, hidden)
    else:
        yield from ((f"self_attn.{name}_proj", (rows, hidden)) for name, rows in (
            ("q", q), ("k", kv), ("v", kv)))
    yield "self_attn.o_proj", (hidden, q)
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield from ((f"self_attn.{name}_norm", (dim,)) for name in "qk")


def _mlp(config: Mapping[str, Any]) -> _Parts:
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "mixtral":
        yield from _experts("block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"], inter,
                            hidden)
    elif config["model_type"] == "gpt_oss":
        yield from _experts("mlp", ("gate_proj", "up_proj", "down_proj"), config["num_local_experts"], inter,
                            hidden, "router")
    elif config["model_type"] == "qwen3_moe":
        yield from _experts("mlp", ("gate_proj", "up_proj", "down_proj"), config["num_experts"],
                            config["moe_intermediate_size"], hidden)
    elif config["model_type"] == "phi3":
        yield from (("mlp.gate_up_proj", (2 * inter, hidden)), ("mlp.down_proj", (hidden, inter)))
    else:
        yield from (("mlp.gate_proj", (inter, hidden)), ("mlp.up_proj", (inter, hidden)),
                    ("mlp.down_proj", (hidden, inter)))


def _experts(module: str, projections: tuple[str, str, str], count: int, inter: int, hidden: int,
             router: str = "gate") -> _Parts:
    yield f"{module}.{router}", (count, hidden)
    for number in range(count):
        for name, shape in zip(projections, ((inter, hidden), (inter, hidden), (hidden, inter))):
            yield f"{module}.experts.{number}.{name}", shape


def _norms(config: Mapping[str, Any]) -> _Parts:
    more = ("pre_feedforward", "post_feedforward") if "gemma" in config["model_type"] else ()
    for name in ("input", "post_attention", *more):
        yield f"{name}_layernorm", (config["hidden_size"],)
