"""What integer layouts have in common: ``w = (code - zero) * scale``, a scale a group."""

from __future__ import annotations

from quantkit.formats.spec import QuantSpec


def fault(name: str, spec: QuantSpec, shape: tuple[int, int],
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
