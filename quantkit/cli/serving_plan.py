"""Says what a server will take of the memory before it is loaded, and refuses what can't fit."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.present import note, show_warning, wrapped
from quantkit.errors import QuantkitError
from quantkit.spec import KVSpec
from quantkit.units import human_bytes

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoint.open import AnyCheckpoint
    from quantkit.fit.serving import ServingPlan
    from quantkit.sources.base import ModelSource

overcommit_option = click.option(
    "--overcommit", is_flag=True,
    help="Load a model whose weights don't fit into the memory that is available. By default it is refused, "
         "because the system would swap or end the process.")


def show_plan(model: str, source: ModelSource | AnyCheckpoint, device: torch.device, *,
              kv: KVSpec | None = None, dtype: str = "auto", max_batch: int = 8,
              kv_memory: int | None = None, prefix_cache: int | None = None,
              overcommit: bool = False) -> None:
    """Print what a server of an open model will take; nothing for a model that can't be counted.

    Args:
        model: what it is called.
        source, device, kv, dtype: as for :func:`quantkit.fit.serving.serving_plan`.
        max_batch: sequences that decode side by side, at most.
        kv_memory: bytes that the KV cache may take, if that is fixed.
        prefix_cache: bytes of prefixes that are kept beside running sequences; 0: none; ``None``: the default
            part of the memory.
        overcommit: go on where the weights don't fit.

    Raises:
        QuantkitError: the weights don't fit into the memory that is available.
        UsageError: the KV setting doesn't fit the model.
    """
    from quantkit.fit.serving import MemoryPart, serving_plan
    from quantkit.runtime.kv_manager import default_prefix_bytes

    also = []
    if device.type == "cpu" and kv_memory is None and prefix_cache != 0:  # else they take pages that are free
        also.append(MemoryPart("prefix cache", prefix_cache or default_prefix_bytes()))
    plan = serving_plan(source, device, kv=kv, dtype=dtype, sequences=max_batch, kv_bytes=kv_memory,
                        also=also)
    if plan is None:
        return
    if not (plan.weights_fit or overcommit):
        raise _refusal(model, plan, hasattr(source, "manifest"))
    note(wrapped("memory:", described(plan), 8))
    if not plan.fits:
        show_warning(_warning(plan))


def described(plan: ServingPlan) -> str:
    """``weights 113 MB, runtime 528 MB, KV cache up to 1.7 GB (8 sequences of 8,192 tokens, …); …``."""
    *others, cache = plan.parts
    parts = [f"{part.name} {human_bytes(part.bytes)}" + (f" ({part.how})" if part.how else "")
             for part in others]
    a_sequence = f"{human_bytes(plan.sequence_bytes)} for each sequence of {plan.context:,} tokens"
    if cache.how:
        parts.append(f"KV cache {human_bytes(cache.bytes)} ({cache.how}; {a_sequence})")
    else:
        parts.append(f"KV cache up to {human_bytes(cache.bytes)} "
                     f"({a_sequence}, --max-batch {plan.sequences})")
    where = "" if plan.device.type == "cpu" else f" on {plan.device}"
    have = "" if plan.available is None else f" of {human_bytes(plan.available)} available{where}"
    return f"{', '.join(parts)}; at most {human_bytes(plan.total)}{have}"


def _warning(plan: ServingPlan) -> str:
    assert plan.available is not None
    have = f"the server may need {human_bytes(plan.total)}, and {human_bytes(plan.available)} are available"
    if plan.fitting is None:
        return f"{have}: give less to --kv-memory, or use --kv int4 or a smaller recipe"
    left = plan.available - plan.total + plan.parts[-1].bytes
    bound = f"--kv-memory {left // 10**6}MB bounds the KV cache, " if left >= 10**6 else ""
    number = {0: "no sequence of full length fits", 1: "1 sequence of full length fits"}.get(
        plan.fitting, f"{plan.fitting:,} sequences of full length fit")
    return (f"{have}: {number}; {bound}--max-batch takes fewer sequences, and --kv int4 makes them "
            "smaller")


def _refusal(model: str, plan: ServingPlan, quantized: bool) -> QuantkitError:
    assert plan.available is not None
    size = f"--memory {max(1, plan.available // 10**6)}MB"
    smaller = (f"make a smaller checkpoint of the original: quantkit plan ORIGINAL --context 4096 {size}"
               if quantized else
               f"quantkit plan {quote(model)} --context 4096 {size} finds a recipe that fits")
    return QuantkitError(
        f"the weights of {model} don't fit into the memory",
        why=f"they take {human_bytes(plan.weights)}, and {human_bytes(plan.available)} are available",
        next=f"{smaller}\nor add --overcommit to load them anyway")
