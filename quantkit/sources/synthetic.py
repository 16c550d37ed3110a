"""Models of real shapes with random weights, made tensor by tensor: for speed, memory and plans."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo
from quantkit.sources.synthetic_configs import CONFIGS, shapes
from quantkit.support.errors import SourceError, UsageError, did_you_mean

PREFIX = "synthetic:"
_STD = 0.02
_CHUNK = 2**22
"""Values drawn at once: 16 MiB as float32, whatever the tensor's size. Part of what a seed means."""
_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


class SyntheticSource:
    """Weights drawn from N(0, 0.02²), norms without weights of their own; the same name and seed give the
    same bytes. Of fewer ``layers``, the first ones."""

    def __init__(self, name: str, seed: int, uri: str, layers: int | None = None) -> None:
        self.uri = uri
        self._seed = seed
        self._config = dict(CONFIGS[name])
        if layers is not None:
            self._config["num_hidden_layers"] = layers
        self._infos = {n: TensorInfo(n, shape, torch.bfloat16) for n, shape in shapes(self._config).items()}

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
