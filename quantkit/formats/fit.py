"""Checks whether a layout can hold a weight, before it is packed."""

from __future__ import annotations

import torch

from quantkit.formats.base import Format
from quantkit.formats.dtypes import dtype_name, resolve
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import SpecError


def require_fit(form: Format, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises SpecError for a weight that ``form`` refuses, or for scales of another dtype than it stores:
    its own (its attribute ``scales``), else that of the model, ``dtype``."""
    if (reason := form.reason_against(spec, shape)) is not None:
        raise SpecError(f"{form.name} can't hold {spec.label()} of shape {list(shape)}", why=reason)
    format_dtype: str | None = getattr(form, "scales", None)
    requested = resolve(spec, dtype, form).scale_dtype
    if format_dtype is not None and requested != format_dtype:
        raise SpecError(f"{form.name} can't store {requested} scales",
                        why=f"its readers take {format_dtype} scales",
                        next=f"scale_dtype: {format_dtype}, or leave it out")
    if format_dtype is None and requested != dtype_name(dtype):
        raise SpecError(f"{form.name} can't store {requested} scales for {dtype_name(dtype)}",
                        why="its readers take scales in the model's dtype", next="scale_dtype: model")


def reason_against_integers(name: str, spec: QuantSpec, shape: tuple[int, int],
                            strategies: tuple[str, ...] = ("channel", "group")) -> str | None:
    """Why the layout ``name``, with these granularities, can't hold such a weight; ``None`` if it can."""
    rows, cols = shape
    if spec.kind != "int":
        other = {"nf": "bnb-nf4", "fp": "float-quantized"}.get(spec.kind, spec.kind)
        return f"{name} holds integers, not {spec.kind}; use format {other}"
    if spec.signed:
        return f"{name} keeps scales without a sign; leave out signed: true"
    if spec.minimum or spec.superblock:
        return f"{name} has whole zero points and plain scales, not {spec.label()}; use symmetric: true"
    if spec.activations:
        return f"{name} is for weights alone; with quantized activations use format int-quantized"
    if rows < 1 or cols < 1:
        return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
    if spec.granularity.strategy not in strategies:
        return (f"{name} has no place for one scale a {spec.granularity.strategy}; "
                f"use strategy {' or '.join(strategies)}")
    size = spec.granularity.size
    if size is not None and cols % size:
        return (f"group size {size} doesn't divide in_features {cols}; "
                f"use {_sizes(cols, size)}strategy channel")
    return None


PREFERRED_GROUPS = (128, 64, 32)
"""Group sizes that other engines have fast kernels for."""


def _sizes(cols: int, wanted: int) -> str:
    """The group sizes nearest to ``wanted`` that divide ``cols``, fast ones first, for a message."""
    divisors = [size for size in range(2, cols + 1) if cols % size == 0]
    fast = sorted((s for s in PREFERRED_GROUPS if s in divisors), key=lambda s: abs(s - wanted))
    below = [s for s in divisors if s < wanted][-1:]
    above = [s for s in divisors if s > wanted][:1]
    candidates = list(dict.fromkeys([*fast[:1], *below, *above]))
    return f"group size {' or '.join(map(str, candidates))}, or " if candidates else ""
