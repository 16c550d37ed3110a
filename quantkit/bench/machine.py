"""What a measurement was made on."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from quantkit import __version__
from quantkit.evaluate.protocol import cpu_cores, cpu_name
from quantkit.ops import cpu_linear


def machine() -> dict[str, Any]:
    """CPU, cores, threads, instruction set, versions and the date."""
    there = cpu_linear.unavailable() is None
    return {"cpu": cpu_name(), "cores": cpu_cores(),
            "threads": cpu_linear.pool().threads if there else torch.get_num_threads(),
            "isa": cpu_linear.isa().name if there else None, "torch": torch.__version__,
            "quantkit": __version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
