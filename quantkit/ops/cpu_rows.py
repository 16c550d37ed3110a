"""Normalization and gated activations by the CPU's row kernels: a row's bits don't depend on the others."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import torch

from quantkit.ops import cpu_machine, cpu_weight
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.program import Program
    from quantkit_kernels.cpu.rows import Source


def takes(x: torch.Tensor) -> bool:
    """Whether these kernels compute it: on a CPU, in a dtype that they know, and without gradients."""
    return (x.device.type == "cpu" and x.dtype in cpu_weight.PLAIN and x.numel() > 0
            and not (torch.is_grad_enabled() and x.requires_grad) and cpu_machine.unavailable() is None)


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` of ``x [..., n]`` and ``weight [n]``: float32 ``[..., n]``."""
    return _run("norm", x, weight=weight, eps=eps)


def gated(source: Source, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` or ``gelu(gate) · up`` of ``[..., n]``: float32 ``[..., n]``."""
    return _run(source, gate, second=up)


class _Kept(threading.local):
    """A thread's programs of one operation."""

    def __init__(self) -> None:
        self.programs: dict[tuple[str, str], Program] = {}


_kept = _Kept()


def _run(source: Source, x: torch.Tensor, second: torch.Tensor | None = None,
         weight: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
    from quantkit_kernels.cpu.weight_decoder import SUB

    size = x.shape[-1]
    parts = {name: _padded(tensor.reshape(-1, size)) for name, tensor in (
        ("x", x), ("second", second), ("weight", weight)) if tensor is not None}
    out = torch.empty_like(parts["x"])
    width = out.shape[1]
    program = _program(source)
    program.set(0, units=len(out), size=size, subgroups=width // SUB, x_stride=width * 4,
                out_stride=width * 4, eps=struct.unpack("<i", struct.pack("<f", eps))[0],
                **{name: tensor.data_ptr() for name, tensor in (*parts.items(), ("out", out))})
    cpu_machine.pool().run(program.records)
    return out[:, :size].reshape(x.shape)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """float32 ``[m, n]`` with 0 up to whole subgroups."""
    from quantkit_kernels.cpu.weight_decoder import SUB

    rows = rows.float()
    if missing := -rows.shape[1] % SUB:  # pad would copy even if nothing is
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.contiguous()


def _program(source: Source) -> Program:
    from quantkit_kernels.cpu.program import Program
    from quantkit_kernels.cpu.rows import RowKernel

    key = source, cpu_machine.isa().name
    if key not in _kept.programs:
        program = _kept.programs[key] = Program(cpu_machine.isa())
        program.add(RowKernel(source, "floats"), 0)
        program.finish(tell_compiling)
    return _kept.programs[key]
