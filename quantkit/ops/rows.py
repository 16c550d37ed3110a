"""Operations on rows, and on one sequence at a time: normalization, gated activations, caps.

On a CPU kernels of ours compute them: a row's bits don't depend on the others."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from quantkit.ops import cpu_machine, cpu_weight, gpu
from quantkit.support.progress import tell_compiling

if TYPE_CHECKING:
    from quantkit_kernels.cpu.program import Program
    from quantkit_kernels.cpu.rows import Source


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise: SwiGLU, https://arxiv.org/abs/2002.05202.

    Args:
        gate: any shape and floating dtype.
        up: a tensor like ``gate``.

    Returns:
        A new tensor like ``gate``; neither argument is written. On a CPU a row's bits don't depend on the
        others, unless gradients are asked for.
    """
    if _cpu_kernels_take(gate):
        return _gated("silu", gate, up).to(gate.dtype)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with GELU's approximation by tanh, https://arxiv.org/abs/1606.08415: GeGLU.

    Arguments and result are as for :func:`silu_mul`.
    """
    if _cpu_kernels_take(gate):
        return _gated("gelu", gate, up).to(gate.dtype)
    return F.gelu(gate, approximate="tanh").mul_(up)


CLAMPED_GAIN = 1.702
"""The sigmoid's gain in :func:`clamped_silu_mul`: with it a gate's activation is close to GELU."""


def clamped_silu_mul(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``g · sigmoid(1.702 g) · (u + 1)``, elementwise, with ``g = min(gate, limit)`` and ``u`` as ``up``, but
    within ``[-limit, limit]``: gpt-oss, https://arxiv.org/abs/2508.10925.

    Arguments and result are otherwise as for :func:`silu_mul`, by which it is computed, in float32. Its
    arguments are rounded once.
    """
    gain = gate.double().clamp(max=limit) * CLAMPED_GAIN
    other = (up.double().clamp(-limit, limit) + 1) / CLAMPED_GAIN
    return silu_mul(gain.float(), other.float()).to(gate.dtype)


def softcapped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap · tanh(x / cap)``, in x's dtype, https://arxiv.org/abs/2408.00118; x itself without a cap."""
    return x if cap is None else (x / cap).tanh() * cap


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, https://arxiv.org/abs/1910.07467.

    Args:
        x: ``[..., n]``, any floating dtype.
        weight: ``[n]``, x's dtype, or float32.
        eps: added to the mean square.

    Returns:
        ``[..., n]`` in x's dtype. Statistics are float32; the normalized value is rounded to x's
        dtype before a weight of that dtype multiplies it, and after one of float32 did, as transformers does
        in Llama and in Gemma: so half-precision results agree. On a CPU a row's bits don't depend on the
        others, unless gradients are asked for.
    """
    if _cpu_kernels_take(x):
        if weight.dtype != x.dtype:
            return _normalized(x, weight, eps).to(x.dtype)
        return _normalized(x, torch.ones_like(weight), eps).to(x.dtype) * weight
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    kernel = (x.is_cuda or gpu.SIMULATE) and not (torch.is_grad_enabled() and x.requires_grad)
    if kernel and gpu.reason_against_norm(x.device.type, x.dtype, x.shape[-1]) is None:
        from quantkit_kernels.triton.rms_norm import rms_norm as fused

        return fused(x, weight, eps)[0]
    # without a weight torch works in float32 and rounds once; with one it would round after multiplying
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def by_sequence(x: torch.Tensor) -> list[torch.Tensor]:
    """``[1, …]`` for each sequence of ``x [B, …]``, in memory of its own.

    torch cuts a tensor into vectors and shares it out to threads by its size, and computes what is left over
    by other instructions: the bits of an exponential or of a sum may depend on where in the tensor it stands.
    So functions that round otherwise than by one IEEE operation an element see one sequence a call: the shape
    that it has alone.
    """
    return [sequence.clone() for sequence in x.split(1)] if x.shape[0] > 1 else [x]


def _cpu_kernels_take(x: torch.Tensor) -> bool:
    """Whether these kernels compute it: on a CPU, in a dtype that they know, and without gradients."""
    return (x.device.type == "cpu" and x.dtype in cpu_weight.PLAIN and x.numel() > 0
            and not (torch.is_grad_enabled() and x.requires_grad)
            and cpu_machine.reason_against_kernels() is None)


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` of ``x [..., n]`` and ``weight [n]``: float32 ``[..., n]``."""
    return _run("norm", x, weight=weight, eps=eps)


def _gated(source: Source, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` or ``gelu(gate) · up`` of ``[..., n]``: float32 ``[..., n]``."""
    return _run(source, gate, second=up)


class _Programs(threading.local):
    """A thread's programs of one operation."""

    def __init__(self) -> None:
        self.programs: dict[tuple[str, str], Program] = {}


_threads = _Programs()


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
    from quantkit_kernels.cpu.weight_decoder import FLOATS

    key = source, cpu_machine.isa().name
    if key not in _threads.programs:
        program = _threads.programs[key] = Program(cpu_machine.isa())
        program.add(RowKernel(source, FLOATS), 0)
        program.finish(tell_compiling)
    return _threads.programs[key]


def greedy(logits: torch.Tensor) -> int | None:
    """Index of the largest of ``logits [vocab]``, the lowest of equals; ``None`` if not all are finite."""
    if logits.device.type != "cpu":
        return int(logits.argmax()) if bool(torch.isfinite(logits).all()) else None
    if cpu_machine.reason_against_kernels() is None:
        from quantkit_kernels.cpu.argmax import argmax

        return argmax(logits.float(), cpu_machine.isa())
    values = logits.float().numpy()
    best = int(values.argmax())
    return best if abs(values).max() < float("inf") else None


def largest_chance(logits: torch.Tensor) -> float:
    """The probability of the most likely of ``logits [vocab]``, float32; NaN if one of them is."""
    if logits.device.type != "cpu":
        return float(logits.softmax(-1).max())
    values = logits.numpy()  # numpy wakes no threads
    return 1.0 / float(np.exp(values - values.max()).sum())


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on the caller's thread alone. Its other threads, once woken, spin for a while on
    cores that the next step needs."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)


def capped_rows(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap · tanh(logits / cap)`` of float32 ``[n, vocab]`` in place, a row at a time: tanh may be another
    function at the end of a tensor. ``None`` changes nothing."""
    if cap is not None:
        with one_thread():
            for row in logits:
                row.div_(cap).tanh_().mul_(cap)
    return logits
