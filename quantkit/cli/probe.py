"""Asks which kernel would run a layer on this machine, without a weight at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quantkit.spec import QuantSpec

PHASES = ("decode", "prefill")


def kernels_for(format: str, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """For each phase the chosen kernel's name (``None``: no kernel takes it) and who declined before it.

    Args:
        format: name of the layout.
        spec: of the weight.
        shape: ``(out, in)``.
        dtype: of the activations.
    """
    from quantkit.errors import QuantkitError
    from quantkit.ops.dispatch import KernelQuery, Phase, choose

    phases: tuple[Phase, ...] = ("decode", "prefill")
    found: dict[str, Any] = {}
    for phase in phases:
        query = KernelQuery("linear", "cpu", None, dtype, shape[0], shape[1], format, spec, phase)
        try:
            choice = choose(query)
        except QuantkitError as error:
            chosen: str | None = None
            declined: tuple[tuple[str, str], ...] = (("all", error.why or error.what),)
        else:
            chosen, declined = choice.kernel.name, choice.declined
        found[phase] = {"kernel": chosen, "declined": [{"kernel": k, "reason": why} for k, why in declined]}
    return found


def dense_kernels() -> dict[str, Any]:
    """The same for a layer that isn't quantized: torch's own multiply."""
    return {phase: {"kernel": "torch", "declined": []} for phase in PHASES}
