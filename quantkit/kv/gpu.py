"""What GPU kernels do with a cache, and its pages as they are given them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantkit.kv.base import KVCodecs
from quantkit.kv.store import PageStore
from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import LayerPages, SideLayout

MAX_GROUP, MAX_HEAD = 16, 256
OPERATIONS = ("rms_norm", "rope + KV write", "decode attention", "prefill attention")
"""What isn't a matrix product, for people."""
_NAMES = re.compile(r"(?:(none|bf16)|(int8)|(fp8)|(channel|token|hadamard)([234])(c?))$")


@dataclass(frozen=True)
class OperationChoice:
    """Who runs an operation: ``triton``, ``cpu`` (kernels of ours) or ``torch``, and why torch."""

    op: str
    kernel: str
    reason: str | None


def choices(codecs: KVCodecs, dtype: torch.dtype, hidden: int, dim: int, group: int, device: str,
            refused: str | None = None) -> Iterator[OperationChoice]:
    """Who runs what isn't a matrix product, for people.

    Args:
        codecs, dtype, dim, group, device: as for :func:`reason_against_cache`.
        hidden: size of the rows that are normalized.
        refused: why the model isn't run as a program.
    """
    norm = gpu.reason_against_norm(device, dtype, hidden)
    yield OperationChoice(OPERATIONS[0], "torch" if norm else "triton", norm)
    reason = refused or reason_against_cache(codecs, dtype, dim, group, device)
    for op in OPERATIONS[1:]:
        yield OperationChoice(op, "torch" if reason else "triton", reason)


def reason_against_cache(codecs: KVCodecs, dtype: torch.dtype, dim: int, group: int,
                         device: str) -> str | None:
    """Why no kernel writes and reads such a cache; ``None`` if they do.

    Args:
        codecs: the codecs of keys and values.
        dtype: the dtype of queries, keys and values.
        dim: the head dimension.
        group: query heads that share a key head.
        device: the device of the pages.
    """
    if (reason := gpu.reason_against(device, dtype)) is not None:
        return reason
    for codec, other in ((codecs.keys, "token"), (codecs.values, "channel")):
        if not (match := _NAMES.fullmatch(codec.name)) or match[4] == other:
            return f"has no kernel for the KV codec {codec.name!r}"
        if codec.name == "bf16" and dtype != torch.bfloat16:
            return f"takes pages of the model's dtype, not {codec.name}"
    return reason_against_heads(dim, group)


def reason_against_heads(dim: int, group: int) -> str | None:
    """Why no kernel attends with such heads, however they are kept; ``None`` if they do. As for
    :func:`reason_against_cache`."""
    if dim % 32 or dim > MAX_HEAD:
        return f"takes head dimensions up to {MAX_HEAD} that 32 divides, not {dim}"
    if group > MAX_GROUP:
        return f"takes up to {MAX_GROUP} query heads a key head, not {group}"
    return None


def side_layout_of(name: str, dtype: torch.dtype) -> SideLayout:
    """What kernels call a codec that :func:`reason_against_cache` doesn't."""
    from quantkit_kernels.triton.cache import FP8, INT8, PLAIN, SideLayout

    match = _NAMES.fullmatch(name)
    assert match is not None
    if match[1]:
        return SideLayout(PLAIN, 8 * dtype.itemsize)
    if match[4]:
        return SideLayout(match[4], int(match[5]), bool(match[6]))
    return SideLayout(INT8 if match[2] else FP8, 8)


def pages_of(store: PageStore, codecs: KVCodecs, dtype: torch.dtype) -> LayerPages:
    """A layer's, as they lie now."""
    from quantkit_kernels.triton.cache import LayerPages, Side

    parts = store.pages.parts
    residual = {} if store.residual is None else store.residual.parts

    def side(letter: str, name: str) -> Side:
        return Side(side_layout_of(name, dtype),
                    parts[f"{letter}.values" if f"{letter}.values" in parts else f"{letter}.codes"],
                    parts.get(f"{letter}.scale"), parts.get(f"{letter}.low", parts.get(f"{letter}.mean")),
                    residual.get(f"{letter}.values"))

    return LayerPages(side("k", codecs.keys.name), side("v", codecs.values.name), parts.get("positions"),
                      residual.get("positions"))
