"""Finds which kernel would run a layer on this machine, without its weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.present import wrapped

if TYPE_CHECKING:
    import torch

    from quantkit.formats.spec import QuantSpec

PHASES = ("decode", "prefill")
DECLINED_HINT = "--declined shows which other kernels declined, and why"
declined_option = click.option("--declined", is_flag=True,
                               help="Also show which kernels declined, and why.")


def kernels_for(format: str, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """The chosen kernel's name for each phase (``None``: no kernel takes it) and who declined before it.

    Args:
        format: name of the layout.
        shape: the weight is ``[out, in]``.
        dtype: the dtype of the activations.
    """
    from quantkit.ops.dispatch import KernelQuery, Phase, choose
    from quantkit.support.errors import QuantkitError

    phases: tuple[Phase, ...] = ("decode", "prefill")
    device, capability = best_device()
    facts: dict[str, Any] = {}
    for phase in phases:
        query = KernelQuery("linear", device, capability, dtype, shape[0], shape[1], format, spec, phase)
        try:
            choice = choose(query)
        except QuantkitError as error:
            chosen: str | None = None
            declined: tuple[tuple[str, str], ...] = (("all", error.why or error.what),)
        else:
            chosen, declined = choice.kernel.name, choice.declined
        facts[phase] = {"kernel": chosen, "declined": [{"kernel": k, "reason": why} for k, why in declined]}
    return facts


def best_device() -> tuple[str, tuple[int, int] | None]:
    """``cuda`` with its compute capability where there is one, else ``cpu``: where models run."""
    import torch

    return ("cuda", torch.cuda.get_device_capability()) if torch.cuda.is_available() else ("cpu", None)


def other_lines(choices: list[dict[str, Any]]) -> Iterator[str]:
    """Lines for a terminal: one per operation."""
    for choice in choices:
        yield wrapped(f"  {choice['op']}", choice["kernel"] + (f": {choice['reason']}"
                                                               if choice["reason"] else ""), 20)
