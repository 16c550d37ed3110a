"""Which kernel runs a quantized matrix multiply, and why the others declined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import QuantkitError

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


def query_for(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
              phase: Phase) -> KernelQuery:
    """The query by which the kernel for this weight is chosen."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KernelQuery("linear", device.type, capability, dtype, weight.shape[0], weight.shape[1],
                       weight.format, weight.spec, phase)


@runtime_checkable
class LinearKernel(Protocol):
    """A kernel for ``y = x Wᵀ`` with quantized W. Registered targets are instances.

    Attributes:
        name: the name that ``inspect`` and ``doctor`` print.
        order: kernels are asked in this order, the reference last.
    """

    name: str
    order: int

    def reason_against(self, query: KernelQuery) -> str | None:
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

    A plugin's kernel that can't be loaded, isn't a kernel or fails while it is asked counts as one that
    declined, and costs one warning.

    Raises:
        QuantkitError: all declined; the reasons are listed.
    """
    from quantkit.plugins.manager import registry

    table = registry("kernels")
    kernels = [(kernel, name) for name, kernel in table.usable() if _has_place(kernel, name)]
    declined = list(table.broken.items())
    for kernel, registered in sorted(kernels, key=lambda pair: (pair[0].order, pair[0].name)):
        reason = _asked(kernel, registered, query)
        if reason is None:
            return KernelChoice(kernel, tuple(declined))
        declined.append((kernel.name, reason))
    raise QuantkitError(f"no kernel runs {query.op} on {query.format} {query.spec.label()}",
                        why="; ".join(f"{n}: {r}" for n, r in declined), next="quantkit doctor")


def has_kernel(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel multiplies by a weight as it is: the reference dequantizes it for every product."""
    return choose(query_for(weight, dtype, device, "decode")).kernel.name != "reference"


def _has_place(kernel: LinearKernel, registered: str) -> bool:
    """Whether a kernel's order is such that it can be asked in its turn."""
    from quantkit.plugins.manager import registry

    if not isinstance(kernel.order, int):
        registry("kernels").reject(registered, f"has order {kernel.order!r}, which isn't an int")
        return False
    return True


def _asked(kernel: LinearKernel, registered: str, query: KernelQuery) -> str | None:
    """What a kernel answers to a query; of a plugin's kernel also that it fails to."""
    from quantkit.plugins.manager import registry
    from quantkit.plugins.registry import BUILTIN, a_type, described

    table = registry("kernels")
    if table.entry(registered).owner == BUILTIN:
        return kernel.reason_against(query)
    try:
        reason: object = kernel.reason_against(query)
    except Exception as error:
        reason = f"reason_against() failed: {described(error)}"
    else:
        if reason is None or isinstance(reason, str):
            return reason
        reason = f"reason_against() returned {a_type(reason)}, not a reason or None"
    table.warn(registered, f"kernel {registered!r} of {table.entry(registered).by}: {reason}")
    return reason


def codes_of(weight: QuantizedTensor) -> Codes:
    """What a kernel packs anew, whatever the weight's format is."""
    from quantkit.plugins.manager import registry

    codes: Codes = registry("formats").get(weight.format).unpack(weight)
    return codes
