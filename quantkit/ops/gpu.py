"""Whether this package's Triton kernels can run somewhere."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

SIMULATE = False
"""Let kernels run on CPU tensors, in Triton's interpreter; ``TRITON_INTERPRET=1`` must have been set before
triton was imported. For tests: it is slow, and wrong in bfloat16."""
MAX_ROW = 32768
"""Numbers of a row that is normalized."""
MAX_GROUP = 128
"""Numbers of a group of activations that is rounded to 4 bits."""
OLDEST = (8, 0)
"""The compute capability that a GPU of NVIDIA needs: older ones lack bfloat16 and asynchronous copies, and
kernels spill their registers there."""
CDNA = ("gfx908", "gfx90a", "gfx94", "gfx95")
"""What names of AMD's GPUs for data centers begin with."""


def reason_against(device: str, dtype: torch.dtype) -> str | None:
    """Why Triton kernels can't compute in ``dtype`` on ``device``; ``None`` if they can."""
    if device != "cuda" and not SIMULATE:
        return f"runs on cuda, not {device}"
    if not _installed():
        return "triton is not installed"
    if device == "cuda" and (capability := _capability()) is not None and capability < OLDEST:
        return "needs a GPU of compute capability {}.{} or newer, not {}.{}".format(*OLDEST, *capability)
    if device == "cuda" and (amd := _amd()) is not None and not amd.startswith(CDNA):
        return f"is made for AMD's CDNA GPUs, not {amd}, whose matrix instructions differ"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"computes in float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if SIMULATE and device == "cpu" and dtype == torch.bfloat16:
        return "triton's interpreter is wrong in bfloat16"
    return None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched there meanwhile: Triton's go to the current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    if device.type != "cuda":
        return values
    with current(device):
        return values.pin_memory().to(device, non_blocking=True)


def reason_against_norm(device: str, dtype: torch.dtype, size: int) -> str | None:
    """Why the fused RMSNorm doesn't take rows of ``size`` numbers."""
    if (reason := reason_against(device, dtype)) is not None:
        return reason
    return f"takes rows of at most {MAX_ROW} numbers, not {size}" if size > MAX_ROW else None


def _capability() -> tuple[int, int] | None:
    """NVIDIA's compute capability of the current GPU; ``None`` if it isn't one of theirs."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability()


def _amd() -> str | None:
    """What AMD calls the current GPU; ``None`` if it isn't one of theirs."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName


@functools.cache
def _installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None
