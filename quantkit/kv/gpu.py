"""What GPU kernels do with a cache, and its pages as they are given them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from quantkit.kv.base import KVCodecs
from quantkit.kv.store import PageStore
from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import LayerPages, SideLayout

MAX_GROUP, MAX_HEAD = 16, 256
_NAMES = re.compile(r"(?:(none|bf16)|(int8)|(fp8)|(channel|token|hadamard)([234])(c?))$")


def reason_against_cache(codecs: KVCodecs, dtype: torch.dtype, dim: int, group: int,
                         device: str) -> str | None:
    """Why no kernel writes and reads such a cache; ``None`` if they do.

    Args:
        dtype: the dtype of queries, keys and values.
        dim: the head dimension.
        group: query heads that share a key head.
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
