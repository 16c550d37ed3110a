"""Models whose mathematics isn't known here, run by transformers' modules, to be evaluated.

They read whole texts; with a KV setting their layers attend over our cache. A checkpoint is dequantized while
it is loaded: what is scored is what its file says, whether or not a library has kernels for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import Any, NoReturn

import torch

from quantkit.checkpoint.dequantized import DequantizedCheckpoint
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.manifest import quantization_label
from quantkit.checkpoint.open import AnyCheckpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.models.loadable import dtype_of
from quantkit.models.modules import Modules, library, quiet
from quantkit.models.outline import TOWER, outline_of_tensors, sizes_of
from quantkit.runtime.loader import SHORT, LoadedModel
from quantkit.sources.base import ModelSource, file_bytes, release
from quantkit.support.device import find_device
from quantkit.support.errors import QuantkitError, UnsupportedModelError, UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.text.tokenizer import Tokenizer

PROBE = 8
"""Tokens of which the head's logits are compared with the whole network's."""


class ModulesModel:
    """A :class:`~quantkit.models.interfaces.LanguageModel` that takes one sequence at a time.

    Args:
        modules: the network with its weights.
        config: the model's sizes.
        dtype, device: of its weights.
    """

    decode_rows = 1
    runs_ahead = decode_matches_prefill = supports_mixed_batches = supports_batched_prefill = False
    supports_drafts = False

    def __init__(self, modules: Modules, config: ModelConfig, dtype: torch.dtype,
                 device: torch.device) -> None:
        self._modules, self.config, self.dtype, self.device = modules, config, dtype, device
        self._base = modules.base

    def check_cache(self, cache: Any) -> NoReturn:
        """Raises UsageError: an engine's cache isn't taken."""
        raise UsageError(f"a model of type {self.config.model_type!r} isn't run here",
                         why=f"{library()} reads its texts, to be scored", next="vllm serve MODEL")

    def prepare(self, cache: Any) -> None:
        self.check_cache(cache)

    def warm_up(self, cache: Any, sequences: int, tokens: int, rows: int = 1,
                taps: tuple[int, ...] = ()) -> NoReturn:
        self.check_cache(cache)

    def chunk_invariant(self, cache: Any) -> bool:
        return False

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
               cache: Any = None) -> torch.Tensor:
        """What the network leaves of int64 ``[B, T]`` before its head, ``[B, T, hidden]``; with a cache's
        batch of what comes after the sequences' tokens. Raises QuantkitError: its layers keep something else
        than keys and values."""
        step = None
        if cache is not None:
            from quantkit.runtime.modules_cache import BatchCache, unsupported

            step = BatchCache(self._modules.network, cache)
        with quiet():
            hidden: torch.Tensor = self._base(input_ids=ids.to(self.device), use_cache=step is not None,
                                              past_key_values=step)[0]
        if step is not None and step.unfinished:
            step.reset()
            raise unsupported("this model", "not all of its layers stored keys and values")
        return hidden

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[..., vocab]`` of what :meth:`hidden` left: the family's own code behind its layers, with
        scales and limits of logits."""
        network, base = self._modules.network, self._base
        rows = x.reshape(1, -1, x.shape[-1])
        layers, base.forward = base.forward, lambda *args, **kwargs: _Left(rows)
        try:
            made = network(input_ids=torch.zeros(rows.shape[:2], dtype=torch.int64, device=self.device),
                           use_cache=False)
        finally:
            base.forward = layers
        logits: torch.Tensor = made.logits.float()
        return logits.reshape(*x.shape[:-1], -1)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None, cache: Any = None,
                 last: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.hidden(ids, positions, cache)
        return self.logits(hidden if last is None else hidden[torch.arange(len(hidden)), last])

    def forward(self, tokens: Sequence[Sequence[int]], batch: Any, wanted: Sequence[int]) -> torch.Tensor:
        self.check_cache(batch)

    def check_head(self) -> None:
        """Raises UnsupportedModelError: the network can't be run, or its head makes other logits of what
        :meth:`hidden` left than the whole network does."""
        network = self._modules.network
        ids = torch.arange(PROBE, device=self.device)[None] % self.config.vocab_size
        try:
            with quiet():
                logits = network(input_ids=ids, use_cache=False).logits.float()
            for base in (self._base, network.get_decoder()):  # of OPT and Bart the head calls the inner one
                self._base = base
                if torch.allclose(self(ids), logits, rtol=1e-3, atol=1e-3, equal_nan=True):
                    return
        except Exception as error:  # whatever a family's code says
            raise UnsupportedModelError(f"{self._modules.name} of transformers can't be run on text alone",
                                        why=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                                        next="vllm serve MODEL") from None
        raise UnsupportedModelError(f"{self._modules.name} of transformers isn't layers and a head",
                                    why="its head needs more than the last hidden states",
                                    next="quantize it without calibration, by int8 or int4-rtn")

    def head_alone(self) -> ModulesModel:
        """The same head on a network without memory for its layers."""
        alone = ModulesModel(self._modules.head_alone(), self.config, self.dtype, self.device)
        if self._base is not self._modules.base:
            alone._base = alone._modules.network.get_decoder()
        return alone

    def linears(self) -> dict[str, Linear]:
        return {}


class _Left:
    """What a network without its head returns, in the place of transformers' many classes for that."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def plain_source(opened: ModelSource | AnyCheckpoint, uri: str) -> ModelSource:
    """Its plain weights. Raises UsageError: inputs of its Linears shall be rounded, too, by a recipe."""
    if not isinstance(opened, Checkpoint | ForeignCheckpoint):
        return opened
    rows = opened.layers if isinstance(opened, Checkpoint) else ()
    row = next((row for row in rows if row.spec is not None and row.spec.activations), None)
    if row is not None:
        raise UsageError(f"{uri} can't be evaluated here", next="vllm serve runs it as it is meant",
                         why=f"{row.name} rounds its inputs, and {library()} would leave them as they are")
    return DequantizedCheckpoint(opened, uri)


def with_attention(sizes: ModelConfig, there: Any, modules: Iterable[Any] = ()) -> ModelConfig:
    """Sizes with what a KV cache needs to know; as they are, without heads, where layers keep something else
    than keys and values. The arguments are
    :func:`~quantkit.runtime.modules_cache.attention_config`'s."""
    from quantkit.runtime.modules_cache import attention_config

    with suppress(QuantkitError):
        return attention_config(sizes, there, modules)
    return sizes


def load_through_modules(uri: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto",
                         loading: Listener = silent) -> LoadedModel:
    """Load a model of an unknown family into transformers' modules. The arguments are
    :func:`~quantkit.runtime.loader.load`'s.

    Raises:
        UnsupportedModelError: transformers isn't there, doesn't know the family, or can't build it.
        UsageError: it rounds inputs.
        QuantkitError: the model isn't there or is damaged.
    """
    place = find_device(device)
    opened = open_model(uri, revision)
    with closing(opened):
        source = plain_source(opened, uri)
        config, infos = source.config(), source.tensors()
        outline, kind = outline_of_tensors(uri, config, infos), dtype_of(config, dtype)
        modules = Modules(source, outline, place, kind)
        units: dict[int | None, list[str]] = {}
        for name in infos:
            if not re.search(TOWER, name):
                units.setdefault(outline.layer_of(name), []).append(name)
        for number, names in enumerate(units.values()):
            loading(ProgressEvent(number, len(units), "weights", unit="layers"))
            modules.put({name: source.tensor(name) for name in names})
            release(source)
        modules.network.tie_weights()
        modules.leave_out(TOWER)
        sizes = with_attention(sizes_of(outline), modules.network.config, modules.network.modules())
        model = ModulesModel(modules, sizes, kind, place)
        model.check_head()
        parameters = sum(slot.in_features * slot.out_features for slot in outline.slots)
        if isinstance(opened, Checkpoint | ForeignCheckpoint):
            label, manifest, bits = quantization_label(opened.layers), opened.manifest, opened.bits_per_weight
        else:
            stored = sum(infos[f"{slot.name}.weight"].nbytes for slot in outline.slots)
            label, manifest, bits = SHORT[kind], None, 8 * stored / parameters
        size = opened.file_bytes if isinstance(opened, Checkpoint | ForeignCheckpoint) else file_bytes(opened)
        return LoadedModel(model, sizes, Tokenizer(source.side_files(), config), uri,
                           f"{label}, by {library()}", manifest, size, bits, weight_bytes=0)
