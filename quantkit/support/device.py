"""Finds a device by its name."""

from __future__ import annotations

import re

import torch

from quantkit.support.errors import UsageError

_NAMES = re.compile(r"cpu|cuda(:\d{1,3})?", re.ASCII)


def gpu_name(device: torch.device) -> str | None:
    """What a GPU is called; ``None``: it is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def find_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: a GPU if torch has one.

    Raises:
        UsageError: it has another name, or can't be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not _NAMES.fullmatch(name):
        raise UsageError(f"the device {name!r} can't be used", next="--device auto",
                         why="a device is cpu, cuda, cuda:1 (the second GPU) or auto: a GPU if there is one")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where triton launches
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"the device {name!r} can't be used", why=str(error).splitlines()[0][:200],
                         next="quantkit doctor shows what this machine has") from None
    return device
