"""Models of real shapes with random weights, made tensor by tensor: for speed, memory and plans."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo
from quantkit.support.errors import SourceError, UsageError, did_you_mean

PREFIX = "synthetic:"
_STD = 0.02
_CHUNK = 2**22
"""Values drawn at once: 16 MiB as float32, whatever the tensor's size. Part of what a seed means."""
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")
_NO_TEXT = ("þ", "ÿ")
"""The bytes 254 and 255, which no UTF-8 has: their merge says that the tokenizer has not lost its merges."""
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
_SMOLLM2 = {**_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000,
            "tie_word_embeddings": True}
_QWEN25 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
           "torch_dtype": "bfloat16", "hidden_size": 1536, "intermediate_size": 8960,
           "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
           "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
           "rope_theta": 1000000.0, "tie_word_embeddings": True}
_BLOCKS = {"block_size": 32}
_QWEN3_1_7B = {"hidden_act": "silu", "torch_dtype": "bfloat16", "hidden_size": 2048,
               "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
               "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
               "rope_theta": 1000000.0}
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
    "smollm2-135m": _SMOLLM2,
    "qwen2.5-1.5b": _QWEN25,
    "blocks-135m": {**_SMOLLM2, **_BLOCKS, "architectures": ["A2DLlamaLMHeadModel"],
                    "model_type": "a2d-llama", "mask_token_id": 49151},
    "blocks-1.5b": {**_QWEN25, **_BLOCKS, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2",
                    "mask_token_id": 151665},
    "qwen3-1.7b": {**_QWEN3_1_7B, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                   "max_position_embeddings": 40960, "tie_word_embeddings": True},
    "sdar-1.7b": {**_QWEN3_1_7B, "architectures": ["SDARForCausalLM"], "model_type": "sdar",
                  "block_size": 4, "mask_token_id": 151669, "max_position_embeddings": 32768,
                  "tie_word_embeddings": False},
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
"""Published configs of every family, and a tiny one each, by the models' names."""


class SyntheticSource:
    """Weights drawn from N(0, 0.02²), norms without weights of their own; the same name and seed give the
    same bytes. Of fewer ``layers``, the first ones."""

    def __init__(self, name: str, seed: int, uri: str, layers: int | None = None) -> None:
        self.uri = uri
        self._seed = seed
        self._config = dict(CONFIGS[name])
        if layers is not None:
            self._config["num_hidden_layers"] = layers
        shapes = tensor_shapes(parse_config(self._config))
        self._infos = {name: TensorInfo(name, shape, torch.bfloat16) for name, shape in shapes.items()}

    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, made now, bfloat16. Raises SourceError for an unknown name."""
        if name not in self._infos:
            raise SourceError(f"{self.uri} has no tensor {name!r}")
        shape = self._infos[name].shape
        if len(shape) == 1:
            less_one = "gemma" in self._config["model_type"]  # Gemma's norms are stored so
            identity = 1.0 if name.endswith("norm.weight") and not less_one else 0.0
            return torch.full(shape, identity, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(shape, dtype=torch.bfloat16)
        for piece in values.view(-1).split(_CHUNK):
            piece.copy_(torch.randn(piece.shape, generator=generator).mul_(_STD))
        return values

    def side_files(self) -> Mapping[str, bytes]:
        return _tokenizer_files(self._config["vocab_size"])

    def identity(self) -> SourceIdentity:
        """Pinned by its name: the weights follow from it."""
        return SourceIdentity("synthetic", self.uri, f"seed={self._seed}", {}, True)

    def close(self) -> None:
        """Nothing is open."""


@functools.lru_cache(maxsize=1)
def _tokenizer_files(vocabulary: int) -> Mapping[str, bytes]:
    """A tokenizer of the 256 bytes and two special tokens, so that the model can be run: ids 0 to 257.

    Ids beyond, which random weights produce too, decode to a space and their number.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *_SPECIAL, "".join(_NO_TEXT)]
    texts += [f"Ġ{number}" for number in range(len(texts), vocabulary)]
    vocab = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[_NO_TEXT]))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _SPECIAL[0],
              "eos_token": _SPECIAL[1], "add_bos_token": False, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _open(uri: str, revision: str | None) -> ModelSource:
    name, _, query = uri.removeprefix(PREFIX).partition("?")
    if name not in CONFIGS:
        raise UsageError(f"no synthetic model is called {name!r}", why=did_you_mean(name, CONFIGS),
                         next=f"{PREFIX}llama-8b")
    if revision is not None:
        raise UsageError("--revision makes no sense for a synthetic model", next=f"{PREFIX}{name}?seed=1")
    numbers: dict[str, int] = {}
    for part in query.split("&") if query else ():
        key, _, value = part.partition("=")
        if key not in ("seed", "layers") or key in numbers or not value.isdecimal() or len(value) > 9:
            raise UsageError(f"{uri!r} has a query that is not seed=NUMBER or layers=NUMBER",
                             next=f"{PREFIX}{name}?seed=1&layers=2")
        numbers[key] = int(value)
    layers = CONFIGS[name]["num_hidden_layers"]
    if not 1 <= numbers.get("layers", 1) <= layers:
        raise UsageError(f"{uri!r} can't have {numbers['layers']} layers", why=f"{name} has {layers}",
                         next=f"{PREFIX}{name}?layers={layers}")
    return SyntheticSource(name, numbers.get("seed", 0), uri, numbers.get("layers"))


KIND = SourceKind(matches=lambda uri: uri.startswith(PREFIX), open=_open,
                  example="synthetic:llama-8b", order=10)
