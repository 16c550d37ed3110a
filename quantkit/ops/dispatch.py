"""Which kernel runs a quantized matrix multiply, and why the others declined."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from quantkit.errors import QuantkitError
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.spec import QuantSpec

Phase = Literal["decode", "prefill"]
DECODE_ROWS = 16
"""Up to this many rows of activations a multiply counts as decode (bound by memory)."""


@dataclass(frozen=True)
class KernelQuery:
    """Everything a kernel may decide by. Never the method: that is not known here."""

    op: str
    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    n: int
    k: int
    format: str
    spec: QuantSpec
    phase: Phase


@runtime_checkable
class LinearKernel(Protocol):
    """A kernel for ``y = x Wᵀ`` with quantized W. Registered targets are instances.

    Attributes:
        name: as ``inspect`` and ``doctor`` print it.
        order: kernels are asked in this order, the reference last.
    """

    name: str
    order: int

    def declines(self, query: KernelQuery) -> str | None:
        """Why it can't or shouldn't run this; ``None`` if it will. Also where the spec says that activations
        are rounded and this kernel doesn't round them: results would be another model's."""

    def prepare(self, weight: QuantizedTensor) -> Any:
        """Repack once for this kernel. Called once a weight; the result is handed to ``run``."""

    def run(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]``, both of the query's dtype."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernel chosen and the reasons of those asked before it, as ``(name, reason)``."""

    kernel: LinearKernel
    declined: tuple[tuple[str, str], ...]


def choose(query: KernelQuery) -> KernelChoice:
    """Ask the registered kernels in order; the first that doesn't decline is taken.

    Raises:
        QuantkitError: all declined; the reasons are listed.
    """
    from quantkit.plugins import registry

    table = registry("kernels")
    declined: list[tuple[str, str]] = []
    for kernel in sorted((table.get(name) for name in table), key=lambda k: (k.order, k.name)):
        reason = reason_to_decline(kernel, query)
        if reason is None:
            return KernelChoice(kernel, tuple(declined))
        declined.append((kernel.name, reason))
    raise QuantkitError(f"no kernel runs {query.op} on {query.format} {query.spec.label()}",
                        why="; ".join(f"{n}: {r}" for n, r in declined), next="quantkit doctor")


def reason_to_decline(kernel: LinearKernel, query: KernelQuery) -> str | None:
    """What :meth:`LinearKernel.declines` says. A kernel that raises, or says anything but a reason or
    ``None``, costs itself only: it is left out with one warning."""
    try:
        reason: object = kernel.declines(query)
    except Exception as error:  # a stranger's kernel may raise anything
        reason = error
    if reason is None or isinstance(reason, str):
        return reason
    fault = (f"declines raises {type(reason).__name__}: {reason}" if isinstance(reason, Exception)
             else f"declines returned {reason!r:.80}, neither a reason nor None")
    _warn_once(kernel.name, fault)
    return fault


@functools.cache
def _warn_once(name: str, fault: str) -> None:
    from quantkit.plugins import whose

    warnings.warn(f"{whose('kernels', name)} was left out: {fault}", stacklevel=4)


def codes_of(weight: QuantizedTensor) -> Codes:
    """What a kernel packs anew, whatever the weight's format is."""
    from quantkit.plugins import registry

    codes: Codes = registry("formats").get(weight.format).unpack(weight)
    return codes
