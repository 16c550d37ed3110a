"""Whether this package's Triton kernels can run somewhere, and which operations they take over there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SIMULATE = False
"""Let kernels run on CPU tensors, in Triton's interpreter; ``TRITON_INTERPRET=1`` must have been set before
triton was imported. For tests: it is slow, and wrong in bfloat16."""
MAX_ROW, MAX_HEAD, MAX_GROUP = 32768, 256, 16
CODECS = ("none", "bf16", "int8")
"""KV codecs that kernels write and read."""


@dataclass(frozen=True)
class Choice:
    """Who runs an operation: ``triton`` or ``torch``, and why not the former."""

    op: str
    kernel: str
    reason: str | None


def unavailable(device: str, dtype: torch.dtype) -> str | None:
    """Why Triton kernels can't compute in ``dtype`` on ``device``; ``None`` if they can."""
    if device != "cuda" and not SIMULATE:
        return f"runs on cuda, not {device}"
    if not _installed():
        return "triton is not installed"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"computes in float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if SIMULATE and device == "cpu" and dtype == torch.bfloat16:
        return "triton's interpreter is wrong in bfloat16"
    return None


def norm_declines(device: str, dtype: torch.dtype, size: int) -> str | None:
    """Why the fused RMSNorm doesn't take rows of ``size`` numbers."""
    if (reason := unavailable(device, dtype)) is not None:
        return reason
    return f"takes rows of at most {MAX_ROW} numbers, not {size}" if size > MAX_ROW else None


def kv_declines(device: str, dtype: torch.dtype, dim: int, group: int, codec: str,
                pages: torch.dtype) -> str | None:
    """Why RoPE + KV write, and decode attention, aren't fused.

    Args:
        device, dtype: of queries.
        dim: of a head.
        group: query heads that share a key head.
        codec: of the KV cache, as it is written: with options, and values' behind keys' if they differ.
        pages: dtype of its codes.
    """
    if (reason := unavailable(device, dtype)) is not None:
        return reason
    if device == "cuda" and dtype == torch.float32:
        return "takes 16-bit queries, not float32"
    if codec not in CODECS:
        return f"knows the KV codecs {', '.join(CODECS)}, not {codec}"
    if pages not in (torch.int8, dtype):
        return f"takes pages of the model's dtype or int8, not {str(pages).removeprefix('torch.')}"
    if dim % 4 or dim > MAX_HEAD:
        return f"takes head dimensions up to {MAX_HEAD} that 4 divides, not {dim}"
    if group > MAX_GROUP:
        return f"takes up to {MAX_GROUP} query heads a key head, not {group}"
    return None


def choices(device: str, dtype: torch.dtype, hidden: int, dim: int, group: int, codec: str = "none",
            plain: bool = True) -> Iterator[Choice]:
    """Who runs what isn't a matrix product, for people.

    Args:
        device, dtype, dim, group, codec: as for :func:`kv_declines`.
        hidden: size of the rows that are normalized.
        plain: the model's attention is Llama's.
    """
    norm = norm_declines(device, dtype, hidden)
    yield Choice("rms_norm", "torch" if norm else "triton", norm)
    fused = kv_declines(device, dtype, dim, group, codec, torch.int8 if codec == "int8" else dtype)
    if fused is None and not plain:
        fused = "takes whole heads and plain scores, not what this model does"
    for op in ("rope + KV write", "decode attention"):
        yield Choice(op, "torch" if fused else "triton", fused)
    yield Choice("prefill attention", "torch", "no kernel of our own yet")


@functools.cache
def _installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None
