"""Replaces scales and norms in a run's finished units. It can be stopped at any instant and done again.

A unit that is written anew isn't there for an instant; so its new form is first stored beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from quantkit.checkpoint.writer import WORK, CheckpointWriter
from quantkit.support.errors import CheckpointError

STAGED = f"{WORK}recover.unit-"
"""Begins the name of a unit's new form."""


def replace(writer: CheckpointWriter, unit: str, tensors: Mapping[str, torch.Tensor],
            rows: Sequence[Mapping[str, Any]]) -> None:
    """Store a unit that exists with other contents; durable when it returns. Raises CheckpointError if the
    disk fails."""
    old_tensors, old_rows = writer.get(unit)
    if list(rows) == old_rows and tensors.keys() == old_tensors.keys() and all(
            torch.equal(tensors[name], old) for name, old in old_tensors.items()):
        return
    del old_tensors
    writer.put(STAGED + unit, tensors, rows)
    writer.put(unit, tensors, rows)
    writer.drop(STAGED + unit)


def mend(writer: CheckpointWriter, units: Iterable[str]) -> None:
    """Finish what :func:`replace` was stopped in. Raises CheckpointError if the disk fails."""
    for unit in units:
        if writer.has(STAGED + unit):
            tensors, rows = writer.get(STAGED + unit)
            writer.put(unit, {name: tensor.clone() for name, tensor in tensors.items()}, rows)
            writer.drop(STAGED + unit)


def require_units(writer: CheckpointWriter, units: Iterable[str]) -> None:
    """Raise CheckpointError if a unit is damaged: others have new scales, and it was made before them."""
    for unit in units:
        if not writer.has(unit):
            raise damaged(writer, f"unit {unit!r}")


def damaged(writer: CheckpointWriter, what: str) -> CheckpointError:
    """The error for what can't be made again."""
    return CheckpointError(f"{what} in {writer.partial} is damaged",
                           why="some layers have new scales already, and it was made before them",
                           next=f"begin again: rm -r {shlex.quote(str(writer.partial))}")
