"""How much memory this machine has for a process, and how much this process takes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RUNTIME_BYTES = 430_000_000
"""Resident memory of a process with torch, LLVM and our kernels, and no model. Measured with a model of 200
kB on 2 cores of an AMD EPYC with AVX2 on 27 November 2026: a server that has answered has 346 MB, a
calibrated quantization 417 MB at its peak, a comparison 415 MB; on another machine a server had 430 MB."""
GPU_RUNTIME_BYTES = 1 << 29
"""Of a GPU's memory what nothing below counts: the driver's own, compiled kernels, graphs."""
ROOT = Path("/")
"""Where ``proc`` and ``sys`` are."""
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of a control group, and the line of its ``memory.stat`` that says what it could give back at once."""


def system_memory() -> dict[str, int | None]:
    """Bytes in ``total`` and ``available`` now, from Linux's /proc/meminfo; ``None``: it isn't known."""
    try:
        lines = (ROOT / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {"total": None, "available": None}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    return {"total": kib.get("MemTotal", 0) * 1024, "available": kib.get("MemAvailable", 0) * 1024}


def available_memory() -> int | None:
    """Bytes that this process can take now without anything being swapped out or killed: what the system has
    available, or what is left of a control group's limit. ``None`` where nothing says it."""
    available = system_memory()["available"]
    if available is None:
        return None
    return max(0, min([available, *(limit - used for limit, used in _groups())]))


def memory_limit() -> int:
    """Bytes that this process can ever have: all of the system's, or a control group's limit."""
    total = system_memory()["total"] or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _groups())])


def free_memory(device: torch.device) -> int | None:
    """Bytes on a device that this process can take now; ``None``: not known."""
    if device.type != "cuda":
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def peak_bytes() -> int:
    """Largest resident set of this process so far, and what it had of a GPU's memory at most.

    Linux's ``ru_maxrss`` survives ``exec`` and so begins at what the *parent* had at its peak; the
    kernel's own high-water mark of this program's memory doesn't.
    """
    torch = sys.modules.get("torch")  # importing it would be measured too
    on_gpu = int(torch.cuda.max_memory_allocated()) if torch and torch.cuda.is_initialized() else 0
    resident = _status("VmHWM")
    if resident is None:
        import resource  # absent on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return resident + on_gpu


def resident_bytes() -> int | None:
    """Resident set of this process now, and what it has of a GPU's memory; ``None``: not known."""
    torch = sys.modules.get("torch")
    on_gpu = int(torch.cuda.memory_allocated()) if torch and torch.cuda.is_initialized() else 0
    resident = _status("VmRSS")
    return None if resident is None else resident + on_gpu


def _groups() -> Iterator[tuple[int, int]]:
    """The limit in bytes of each control group that this process is in and that has one, and what of it is
    used and couldn't be given back at once."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds not in ("", "memory"):
            continue
        base, names = (ROOT / "sys/fs/cgroup", _V2) if kinds == "" else (ROOT / "sys/fs/cgroup/memory", _V1)
        folder = base / path.lstrip("/")
        # in a container its own group may be mounted as the root; outside, groups above have limits too
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(base))):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((group / name).read_text()) for name in names[:2])
                stat = dict(pair.split() for pair in (group / "memory.stat").read_text().splitlines())
                yield limit, used - int(stat.get(names[2], 0))


def _status(key: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
