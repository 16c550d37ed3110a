"""Says what a server will take of the memory before it is loaded, and refuses what can't fit."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.present import note, show_warning, wrapped
from quantkit.kv.spec import KVSpec
from quantkit.support.errors import QuantkitError
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoint.open import AnyCheckpoint
    from quantkit.runtime.memory.serving import ServerMemory
    from quantkit.sources.base import ModelSource

overcommit_option = click.option(
    "--overcommit", is_flag=True,
    help="Load a model whose weights don't fit into the memory that is available. By default it is refused, "
         "because the system would swap or end the process.")


class MemoryForecast:
    """The memory of a server's models, which are opened and loaded one after another.

    Args:
        models: the number of models that will be opened.
        kv, dtype: of all of them, as for :func:`quantkit.runtime.memory.serving.server_memory`.
        max_batch: sequences of a model that decode side by side, at most.
        kv_memory: bytes that the KV cache of each may take, if that is fixed.
        prefix_cache: bytes of prefixes that each keeps beside running sequences; 0: none; ``None``: the
            default part of the memory.
        overcommit: go on where the weights don't fit.
        sharing: processes that load the same models at once, and have an even part of the memory each.
    """

    def __init__(self, models: int = 1, *, kv: KVSpec | None = None, dtype: str = "auto", max_batch: int = 8,
                 kv_memory: int | None = None, prefix_cache: int | None = None,
                 overcommit: bool = False, sharing: int = 1) -> None:
        self._sharing = sharing
        self._models = models
        self._opened = 0
        self._kv = kv
        self._dtype = dtype
        self._max_batch = max_batch
        self._kv_memory = kv_memory
        self._prefix_cache = prefix_cache
        self._overcommit = overcommit
        self._free: int | None = None
        self._needed: list[ServerMemory] = []

    def add(self, model: str, source: ModelSource | AnyCheckpoint, device: torch.device) -> None:
        """Print what the next model will take, before it is loaded, and after the last one what all will;
        nothing of a model that can't be counted.

        Args:
            model: the model's name in messages.
            source: the model, opened.
            device: the device of all models.

        Raises:
            QuantkitError: the weights don't fit into the memory that the models before it leave.
            UsageError: the KV setting doesn't fit the model.
        """
        from quantkit.runtime.cpu import model as cpu_model
        from quantkit.runtime.gpu import model as gpu_model
        from quantkit.runtime.memory.kv import default_prefix_bytes
        from quantkit.runtime.memory.machine import free_memory
        from quantkit.runtime.memory.serving import MemoryPart, server_memory

        if not self._opened:  # later, the models before it have taken some
            free = free_memory(device)
            self._free = None if free is None else free // self._sharing
        self._opened += 1
        also = []
        if device.type == "cpu" and self._kv_memory is None and self._prefix_cache != 0:
            # otherwise prefixes take pages that are free
            size = self._prefix_cache or default_prefix_bytes()
            also.append(MemoryPart("prefix cache", size, grows=True))
        reason_against = (gpu_model if device.type == "cuda" else cpu_model).reason_against
        needed = server_memory(source, device, self._free, reason_against, before=self._needed, kv=self._kv,
                               dtype=self._dtype, sequences=self._max_batch, kv_bytes=self._kv_memory,
                               also=also)
        if needed is not None:
            if not (needed.weights_fit or self._overcommit):
                raise _weights_error(model, needed, hasattr(source, "manifest"))
            note(wrapped("memory:", described(needed), 8))
            self._needed.append(needed)
        if self._opened == self._models and self._needed:
            self._show_total()

    def _show_total(self) -> None:
        models = self._needed
        total = sum(model.total for model in models)
        if len(models) > 1:
            note(wrapped("memory:", f"{len(models)} models; at most {human_bytes(total)}"
                                    f"{_have(self._free, models[0].device)}", 8))
        if self._free is not None and total > self._free:
            show_warning(_warning(models, total, self._free))


def described(memory: ServerMemory) -> str:
    """``weights 113 MB, runtime 528 MB, KV cache up to 1.7 GB (8 sequences of 8,192 tokens, …); …``."""
    *others, cache = memory.parts
    parts = [f"{part.name} {human_bytes(part.bytes)}" + (f" ({part.how})" if part.how else "")
             for part in others]
    a_sequence = f"{human_bytes(memory.sequence_bytes)} for each sequence of {memory.context:,} tokens"
    if cache.how:
        parts.append(f"KV cache {human_bytes(cache.bytes)} ({cache.how}; {a_sequence})")
    else:
        parts.append(f"KV cache up to {human_bytes(cache.bytes)} "
                     f"({a_sequence}, --max-batch {memory.sequences})")
    beside = " beside the models before it" if memory.before and memory.free is not None else ""
    return (f"{', '.join(parts)}; at most {human_bytes(memory.total)}{_have(memory.available, memory.device)}"
            f"{beside}")


def _have(available: int | None, device: torch.device) -> str:
    where = "" if device.type == "cpu" else f" on {device}"
    return "" if available is None else f" of {human_bytes(available)} available{where}"


def _warning(models: Sequence[ServerMemory], total: int, free: int) -> str:
    have = f"the server may need {human_bytes(total)}, and {human_bytes(free)} are available"
    if any(memory.fitting is None for memory in models):
        return f"{have}: give less to --kv-memory, or use --kv int4 or a smaller recipe"
    caches = sum(memory.parts[-1].bytes for memory in models)
    left = (free - total + caches) // len(models)
    of_each = " of each model" if len(models) > 1 else ""
    bound = f"--kv-memory {left // 10**6}MB bounds the KV cache{of_each}, " if left >= 10**6 else ""
    fitting = ""
    if len(models) == 1:
        number = models[0].fitting
        fitting = {0: "no sequence of full length fits; ", 1: "1 sequence of full length fits; "}.get(
            number or 0, f"{number:,} sequences of full length fit; ")
    return (f"{have}: {fitting}{bound}--max-batch takes fewer sequences, and --kv int4 makes them "
            "smaller")


def _weights_error(model: str, memory: ServerMemory, quantized: bool) -> QuantkitError:
    assert memory.available_now is not None
    size = f"--memory {max(1, memory.available_now // 10**6)}MB"
    step = (f"make a smaller checkpoint of the original: quantkit plan ORIGINAL --context 4096 {size}"
            if quantized else
            f"quantkit plan {quote(model)} --context 4096 {size} finds a recipe that fits")
    why = f"they take {human_bytes(memory.weights)}, and {human_bytes(memory.available_now)} are available"
    if memory.before:
        taken = sum(other.reserved for other in memory.before)
        why += f" beside the models before it, which take {human_bytes(taken)}"
        if not all(other.parts[-1].grows for other in memory.before):
            step = f"--kv-memory bounds what each model's KV cache takes\nor {step}"
    return QuantkitError(f"the weights of {model} don't fit into the memory", why=why,
                         next=f"{step}\nor add --overcommit to load them anyway")
