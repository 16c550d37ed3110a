"""Checks the values that a checkpoint stores: of packed weights of any format, through the format's own
unpacking, and of the tensors that aren't quantized."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.plugins.manager import registry
from quantkit.support.errors import QuantkitError

Status = Literal["ok", "failed", "note"]


@dataclass(frozen=True)
class VerifyCheck:
    """One thing looked at. ``detail`` says what was found; a ``note`` is nothing wrong."""

    name: str
    status: Status
    detail: str = ""


def value_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence for every quantized layer whose stored values can't be right, one layer in memory
    at a time: scales that aren't finite, codes or zero points out of range, unreadable tensors."""
    for row in checkpoint.manifest.layers:
        try:
            packed = checkpoint.quantized(row.name)
            fault = packed_fault(packed) if packed is not None else None
        except QuantkitError as error:
            fault = " ".join(filter(None, (error.what, error.why)))
        checkpoint.release()
        if fault is not None:
            yield f"{row.name}: {fault}"


def plain_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence for every tensor outside of the quantized weights (norms, embeddings, biases, routers,
    Linears that stay as they are) that holds NaN or infinite values, one tensor in memory at a time."""
    quantized = {row.name for row in checkpoint.manifest.layers if row.spec is not None}
    for name in checkpoint.infos:
        parents = itertools.accumulate(name.split("."), "{}.{}".format)
        if not name.endswith(".bias") and not quantized.isdisjoint(parents):
            continue
        try:
            checkpoint.tensor(name)
        except QuantkitError as error:
            yield error.what
        checkpoint.release()


def packed_fault(packed: QuantizedTensor) -> str | None:
    """What is wrong with the values of one packed weight; ``None`` if nothing. That its floats are finite was
    checked when they were read."""
    if (shape := packed.tensors.get("weight_shape")) is not None and shape.tolist() != list(packed.shape):
        return f"weight_shape says {shape.tolist()}, the layer is {list(packed.shape)}"
    form: Format = registry("formats").get(packed.format)
    codes: Codes = form.unpack(packed)
    return codes.fault(packed.shape)
