"""Describes the machine on which a measurement was made."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from quantkit import __version__
from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.ops import cpu_machine
from quantkit.support.device import gpu_name


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """CPU, cores, threads, instruction set, the GPU if that is the device, versions and the date."""
    available = cpu_machine.unavailable() is None
    return {"cpu": cpu_name(), "gpu": None if device is None else gpu_name(device), "cores": cpu_cores(),
            "threads": cpu_machine.pool().threads if available else torch.get_num_threads(),
            "isa": cpu_machine.isa().name if available else None, "torch": torch.__version__,
            "quantkit": __version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
