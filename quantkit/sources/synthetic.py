"""Models of real shapes with random weights, made tensor by tensor: for speed, memory and plans."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import SourceError, UsageError, did_you_mean
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo

PREFIX = "synthetic:"
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
          "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                 "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
                 "rope_theta": 500000.0, "tie_word_embeddings": False},
    "llama-1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                 "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                 "rope_theta": 500000.0, "tie_word_embeddings": True,
                 "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "tiny": {**_LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
             "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
             "tie_word_embeddings": False},
}
_STD = 0.02
_CHUNK = 2**22
"""Values drawn at once: 16 MiB as float32, whatever the tensor's size. Part of what a seed means."""
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


class SyntheticSource:
    """Weights drawn from N(0, 0.02²), norms of ones; the same name and seed give the same bytes."""

    def __init__(self, name: str, seed: int, uri: str) -> None:
        self.uri, self._seed, self._config = uri, seed, CONFIGS[name]
        self._infos = {n: TensorInfo(n, shape, torch.bfloat16) for n, shape in _shapes(self._config).items()}

    def config(self) -> dict[str, Any]:
        """The config of the model whose shapes these are."""
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, made now, bfloat16. Raises SourceError for an unknown name."""
        if name not in self._infos:
            raise SourceError(f"{self.uri} has no tensor {name!r}")
        shape = self._infos[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(shape, dtype=torch.bfloat16)
        for piece in values.view(-1).split(_CHUNK):
            piece.copy_(torch.randn(piece.shape, generator=generator).mul_(_STD))
        return values

    def side_files(self) -> Mapping[str, bytes]:
        """A tokenizer of the 256 bytes and two special tokens, so that the model can be run: ids 0 to 257.

        Ids beyond, which random weights produce too, decode to nothing.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _SPECIAL[0],
                  "eos_token": _SPECIAL[1], "add_bos_token": False, "clean_up_tokenization_spaces": False}
        return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(),
                "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}

    def identity(self) -> SourceIdentity:
        """Pinned by its name: the weights follow from it."""
        return SourceIdentity("synthetic", self.uri, f"seed={self._seed}", {}, True)

    def close(self) -> None:
        """Nothing is open."""


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in (("self_attn.q_proj", (q, hidden)), ("self_attn.k_proj", (kv, hidden)),
                            ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, q)),
                            ("mlp.gate_proj", (inter, hidden)), ("mlp.up_proj", (inter, hidden)),
                            ("mlp.down_proj", (hidden, inter)), ("input_layernorm", (hidden,)),
                            ("post_attention_layernorm", (hidden,))):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _open(uri: str, revision: str | None) -> ModelSource:
    name, _, query = uri.removeprefix(PREFIX).partition("?")
    if name not in CONFIGS:
        raise UsageError(f"no synthetic model is called {name!r}", why=did_you_mean(name, CONFIGS),
                         next=f"{PREFIX}llama-8b")
    if revision is not None:
        raise UsageError("--revision makes no sense for a synthetic model", next=f"{PREFIX}{name}?seed=1")
    seed = query.removeprefix("seed=") if query else "0"
    if not seed.isdecimal() or len(seed) > 9:
        raise UsageError(f"{uri!r} has a query that is not seed=NUMBER", next=f"{PREFIX}{name}?seed=1")
    return SyntheticSource(name, int(seed), uri)


KIND = SourceKind(matches=lambda uri: uri.startswith(PREFIX), open=_open,
                  example="synthetic:llama-8b", order=10)
