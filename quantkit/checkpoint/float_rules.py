"""The loading rules of other engines for 4-bit floats and for fp8 in squares; see :mod:`engine_rules`."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.checkpoint.checks import VerifyCheck
from quantkit.checkpoint.engine_rules import CheckpointFacts, told
from quantkit.checkpoint.manifest import LayerRow
from quantkit.models.architecture import HEAD


def _squares(subject: CheckpointFacts) -> list[tuple[LayerRow, int]]:
    """Layers whose scales belong to squares, and the squares' size."""
    return [(row, row.spec.granularity.size or 1) for row in subject.packed
            if row.spec and row.spec.granularity.strategy == "tile"]


def one_global_scale(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Of q, k and v, and of gate and up, kernels take one global scale for all, whatever the others' are."""
    if not subject.global_scales:
        return
    faults = []
    for group in subject.fused().values():
        known = [(row.name, subject.global_scales[row.name]) for row in group
                 if row.name in subject.global_scales]
        faults += [(name, f"has global scales {scales}, {known[0][0]} has {known[0][1]}: fused layers must "
                          "share them") for name, scales in known if scales != known[0][1]]
    yield from told("global scales", faults, "q/k/v and gate/up share them")


def whole_inputs(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Inputs are rounded in groups that must divide them."""
    if squares := [(row, size) for row, size in _squares(subject) if row.spec and row.spec.activations]:
        yield from told("inputs", [
            (row.name, f"in_features {row.shape[1]} is no multiple of the {size} inputs that share a scale")
            for row, size in squares if row.shape[1] % size], "whole groups")


def whole_rows(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Weights are fused with their scales, so that no square may lie across two of them."""
    squares = {row.name: size for row, size in _squares(subject)}
    if squares:
        yield from told("fused rows", [
            (row.name, f"out_features {row.shape[0]} is no multiple of {squares[row.name]}: a square of the "
                       "fused layer would lie across two")
            for group in subject.fused().values() for row in group[:-1]
            if row.name in squares and row.shape[0] % squares[row.name]], "whole squares")


def whole_squares(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers works the squares' size out from the number of scales where it dequantizes (on CPUs and
    older GPUs), and elsewhere rounds inputs in whole groups."""
    yield from told("squares", [
        (row.name, f"{list(row.shape)} isn't whole squares of {size}, and transformers takes all layers' "
                   "squares to be whole")
        for row, size in _squares(subject) if any(side % size for side in row.shape if side > size)],
        "whole ones")


def sglang_floats(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """It has no kernel for MXFP4 but that of experts, nor for squares without rounded inputs."""
    faults = [(row.name, "MXFP4 is multiplied in experts only: quantize to nvfp4") for row in subject.packed
              if row.format == "mxfp4-pack-quantized" and ".experts." not in row.name]
    for row, _ in _squares(subject):
        if row.spec and not row.spec.activations:
            faults.append((row.name, "fp8 in squares needs activations: group"))
        elif row.name == HEAD:
            faults.append((row.name, "the head can't be in squares: use strategy channel"))
    if faults:
        yield from told("kernel for floats", faults, "every weight has one")


def sglang_amx(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Its CPU kernel for fp8 in squares."""
    if subject.device == "cpu":
        yield VerifyCheck("kernel on cpu", "note", "its kernel needs a CPU with AMX")
