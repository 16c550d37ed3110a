"""A ``.gguf`` file as a Hugging Face model: names, shapes and RoPE layout of Hugging Face, bfloat16.

GGUF keeps the Q and K rows of Llama models interleaved for its own RoPE; they are put back to the
rotate-half order that ``config.json`` means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError, did_you_mean
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo
from quantkit.sources.gguf_header import check_gguf
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.sources.local import sha256_file

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
          "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
          "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
          "ffn_down": "mlp.down_proj"}
_IGNORED = {"rope_freqs.weight"}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.([a-z_]+)\.(weight|bias)")


class GGUFSource:
    """One GGUF file; tensors are dequantized one at a time.

    Raises:
        SourceError: malformed, of an unknown architecture, or with a tensor that has no place in it.
    """

    def __init__(self, path: Path, uri: str, identity: SourceIdentity | None = None) -> None:
        check_gguf(path)
        from gguf import GGUFReader

        self.path, self.uri = path, uri
        self._identity = identity or SourceIdentity("gguf", uri)
        try:
            reader = GGUFReader(str(path))
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise SourceError(f"{path} can't be read as GGUF", why=str(error)[:200]) from error
        self._fields = reader.fields
        self._architecture = self._value("general.architecture")
        if self._architecture not in _CLASSES:
            raise SourceError(f"{path} holds a {self._architecture!r} model",
                              why=did_you_mean(str(self._architecture), _CLASSES),
                              next="give the model's Hugging Face folder instead")
        self._raw = {}
        self._names = {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            if (name := self._hf_name(tensor.name)) is not None:
                self._raw[name] = tensor
        self._infos = {name: TensorInfo(name, tuple(int(d) for d in reversed(t.shape)), torch.bfloat16)
                       for name, t in self._raw.items()}
        self._config = self._read_config()

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that the metadata means."""
        return dict(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, as bfloat16."""
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, dequantized to bfloat16."""
        from gguf.quants import dequantize

        if name not in self._raw:
            raise SourceError(f"{self.path} has no tensor for {name!r}")
        raw = self._raw[name]
        try:
            values = torch.from_numpy(dequantize(raw.data, raw.tensor_type)).reshape(self._infos[name].shape)
        except (NotImplementedError, ValueError) as error:
            raise SourceError(f"{self.path}: tensor {raw.name!r} of type {raw.tensor_type.name} "
                              "can't be dequantized", why=str(error)) from error
        if self._architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self._config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            rows, cols = values.shape
            values = values.reshape(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)
        return values.to(torch.bfloat16)

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer and chat template, made from the metadata."""
        return tokenizer_files({k: self._value(k) for k in self._fields if k.startswith("tokenizer.")},
                               str(self.path))

    def identity(self) -> SourceIdentity:
        """With the file's sha256."""
        known = self._identity
        return SourceIdentity(known.kind, known.uri, known.revision,
                              {self.path.name: sha256_file(self.path)}, known.pinned)

    def close(self) -> None:
        """Let go of the memory map."""
        self._raw = {}

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def _need(self, key: str) -> Any:
        value = self._value(f"{self._architecture}.{key}")
        if value is None:
            raise SourceError(f"{self.path} has no {self._architecture}.{key}",
                              why="the model can't be built without it", next="use another conversion")
        return value

    def _hf_name(self, name: str) -> str | None:
        if name in _TOP:
            return _TOP[name]
        found = _BLOCK.fullmatch(name)
        if found and found[2] in _LAYER:
            return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
        if name in _IGNORED:
            return None
        raise SourceError(f"{self.path} has a tensor {name[:80]!r} that {self._architecture} has no place for",
                          next="give the model's Hugging Face folder instead")

    def _read_config(self) -> dict[str, Any]:
        arch = self._architecture
        heads = int(self._need("attention.head_count"))
        hidden = int(self._need("embedding_length"))
        theta = float(self._value(f"{arch}.rope.freq_base", 10000.0))
        config: dict[str, Any] = {
            "architectures": [_CLASSES[arch]], "model_type": arch, "hidden_act": "silu",
            "hidden_size": hidden, "intermediate_size": int(self._need("feed_forward_length")),
            "num_hidden_layers": int(self._need("block_count")), "num_attention_heads": heads,
            "num_key_value_heads": int(self._value(f"{arch}.attention.head_count_kv", heads)),
            "head_dim": int(self._value(f"{arch}.attention.key_length", hidden // heads)),
            "max_position_embeddings": int(self._need("context_length")),
            "rms_norm_eps": round(float(self._need("attention.layer_norm_rms_epsilon")), 10),
            "rope_theta": int(theta) if theta.is_integer() else theta,
            "vocab_size": self._infos["model.embed_tokens.weight"].shape[0]
            if "model.embed_tokens.weight" in self._infos else 0,
            "tie_word_embeddings": "lm_head.weight" not in self._infos, "torch_dtype": "bfloat16"}
        if arch == "llama":
            config["attention_bias"] = any(n.endswith("q_proj.bias") for n in self._infos)
            config["mlp_bias"] = any(n.endswith("up_proj.bias") for n in self._infos)
        if scaling := self._value(f"{arch}.rope.scaling.type"):
            if scaling not in ("none", "linear"):
                raise SourceError(f"{self.path} scales its RoPE by {scaling!r}",
                                  why="only 'linear' can be taken from GGUF metadata",
                                  next="give the model's Hugging Face folder instead")
            if scaling == "linear":
                factor = float(self._value(f"{arch}.rope.scaling.factor", 1.0))
                config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        if "rope_freqs.weight" in self._names:
            raise SourceError(f"{self.path} carries RoPE frequency factors (rope_freqs)",
                              why="Llama 3.1's scaling is stored there without the numbers config.json needs",
                              next="give the model's Hugging Face folder instead")
        for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
            if (value := self._value(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[key] = int(value)
        return config


def _open(uri: str, revision: str | None) -> ModelSource:
    if revision is not None:
        raise SourceError(f"--revision {revision} makes no sense for a file", next="leave it out")
    path = Path(uri).expanduser()
    if not path.is_file():
        raise SourceError(f"{uri} doesn't exist" if not path.exists() else f"{uri} is not a file",
                          next="give a .gguf file, or a model's folder")
    return GGUFSource(path, uri)


KIND = SourceKind(matches=lambda uri: uri.lower().endswith(".gguf") and not uri.startswith("pkg:"),
                  open=_open, example="model.gguf", order=30)
