"""A name → a model that runs: a checkpoint of ours, or any source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.reader import Checkpoint, is_checkpoint
from quantkit.errors import SourceError, UsageError
from quantkit.formats.base import QuantizedTensor
from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.sources.base import ModelSource, open_source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the network.
        config: its shape.
        tokenizer: text ⇄ ids.
        uri: what was loaded.
        label: ``bf16``, or what was done to it: ``gptq int4 g64 sym``.
        manifest: of a checkpoint, else ``None``.
        file_bytes: of all weights as they are stored (for a source: in the dtype it yields).
        bits_per_weight: stored bits of the Linears over their parameters; embeddings, head and
            norms are not counted.
    """

    model: CausalLM
    config: ModelConfig
    tokenizer: Tokenizer
    uri: str
    label: str
    manifest: Manifest | None
    file_bytes: int
    bits_per_weight: float

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in."""
        return self.model.dtype


def load(uri: str, *, revision: str | None = None, dtype: str = "auto",
         device: str = "cpu") -> LoadedModel:
    """Load a model.

    Args:
        uri: a checkpoint's folder, or anything a source takes.
        revision: for a hub model.
        dtype: of activations and plain weights; ``auto`` takes the model's.
        device: where it runs.

    Raises:
        QuantkitError: it isn't there, is damaged, or holds a tensor too many or too few.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"no dtype is called {dtype!r}", why=f"known: auto, {', '.join(DTYPES)}")
    if is_checkpoint(uri):
        return _checkpoint(Checkpoint.open(Path(uri)), uri, dtype, device)
    return _source(open_source(uri, revision), uri, dtype, device)


def _source(source: ModelSource, uri: str, dtype: str, device: str) -> LoadedModel:
    hf, infos = source.config(), source.tensors()
    config = parse_config(hf)
    needed = set(tensor_shapes(config))
    _strict(uri, needed, set(infos), config)
    kind = _dtype(hf, dtype)
    weights = Weights(source.tensor, infos.__contains__, kind, device=device)
    model = CausalLM(config, weights)
    slots = [infos[f"{s.name}.weight"] for s in linear_slots(config)]
    bits = 8 * sum(i.nbytes for i in slots) / sum(i.nbytes // i.dtype.itemsize for i in slots)
    stored = {i.dtype for i in slots}
    label = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(stored.pop(), "mixed")
    return LoadedModel(model, config, Tokenizer(source.side_files(), hf), uri, label, None,
                       sum(i.nbytes for i in infos.values()), bits)


def _checkpoint(checkpoint: Checkpoint, uri: str, dtype: str, device: str) -> LoadedModel:
    hf = checkpoint.config()
    config = parse_config(hf)
    kind = _dtype(hf, dtype)

    def quantized(name: str) -> QuantizedTensor | None:
        found = checkpoint.quantized(name)
        if found is None:
            return None
        return QuantizedTensor(found.format, found.spec, found.shape, kind,
                               {k: t.to(device) for k, t in found.tensors.items()})

    model = CausalLM(config, Weights(checkpoint.tensor, checkpoint.has, kind, quantized, device))
    return LoadedModel(model, config, Tokenizer(checkpoint.side_files(), hf), uri,
                       manifest_label(checkpoint.manifest), checkpoint.manifest, checkpoint.file_bytes,
                       checkpoint.manifest.bits_per_weight)


def manifest_label(manifest: Manifest) -> str:
    """``gptq int4 g64 sym``; several kinds are joined by commas."""
    kinds = dict.fromkeys(f"{row.method} {row.spec.label()}" for row in manifest.layers
                          if row.method and row.spec)
    return ", ".join(kinds) or "unquantized"


def _dtype(hf: dict[str, Any], dtype: str) -> torch.dtype:
    if dtype == "auto":
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise SourceError(f"config.json has dtype {dtype!r}", why=f"known: {', '.join(DTYPES)}",
                          next="give --dtype bfloat16")
    return DTYPES[dtype]


def _strict(uri: str, needed: set[str], found: set[str], config: ModelConfig) -> None:
    """No weight is left at random, none is silently unused."""
    spare = {n for n in found - needed if not n.endswith(_DERIVED)}
    if config.tie_word_embeddings:
        spare.discard("lm_head.weight")
    for names, what in ((needed - found, "lacks"), (spare, "has a tensor too many,")):
        if names:
            raise SourceError(f"{uri} {what} {sorted(names)[0]!r}",
                              why=f"{len(names)} tensors don't fit {config.model_type}'s layout",
                              next=f"quantkit inspect {uri}")
