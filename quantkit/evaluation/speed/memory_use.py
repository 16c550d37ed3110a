"""How much memory this process and a loaded model take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


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


def _status(key: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def weights_in_memory(loaded: LoadedModel) -> int:
    """Bytes of all weights as they lie in memory. Where no program runs the model: before kernels repack
    them."""
    from quantkit.runtime.cpu.model import CpuModel
    from quantkit.runtime.gpu.model import GpuModel

    model = loaded.model
    return model.weight_bytes if isinstance(model, CpuModel | GpuModel) else loaded.weight_bytes


def workspace_bytes(loaded: LoadedModel) -> int | None:
    """Bytes of the buffers of the programs that the model has run; ``None`` if it isn't run as one."""
    from quantkit.runtime.cpu.model import CpuModel

    return loaded.model.workspace_bytes if isinstance(loaded.model, CpuModel) else None
