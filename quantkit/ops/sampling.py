"""The most likely token, without waking any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quantkit.ops import cpu_machine


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
    """The probability of the most likely of ``logits [vocab]``, float32 on a CPU."""
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
