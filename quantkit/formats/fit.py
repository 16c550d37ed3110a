"""What our layouts share: whether one can hold a weight, and packing around what is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.dtypes import dtype_name, resolve
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import SpecError

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class FormatBase(ABC):
    """Base of our layouts; :class:`~quantkit.formats.base.Format` says what the methods do.

    Attributes:
        scales: the dtype that scales are kept in; ``None`` stands for the model's.
        converts_scales: whether specs with scales of another dtype are taken, too.
    """

    name: str
    quant_method: str
    scales: str | None = None
    converts_scales = False

    @abstractmethod
    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Why the layout can't hold such a weight."""

    @abstractmethod
    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        """The layout of a weight that it takes."""

    @abstractmethod
    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors of codes whose spec is resolved, in a model of ``dtype``."""

    @abstractmethod
    def unpack(self, packed: QuantizedTensor) -> Codes:
        """Stored tensors → codes, exactly those that were packed."""

    def layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        """Raises SpecError if it refuses the weight, or for scales of another dtype than it keeps."""
        check_fit(self, spec, shape, dtype)
        return self.stored_layout(spec, shape, dtype)

    def pack(self, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
        """Codes → stored tensors. Raises SpecError as :meth:`layout` does."""
        spec = resolve(codes.spec, dtype, self)
        shape = (codes.codes.shape[0], codes.codes.shape[1])
        layout = self.layout(spec, shape, dtype)
        tensors = self.stored_tensors(replace(codes, spec=spec), layout, dtype)
        return QuantizedTensor(self.name, spec, shape, dtype, tensors)

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """The weight in float32 ``[out, in]``."""
        return dequantize(self.unpack(packed))


def check_fit(form: Format, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises SpecError for a weight that ``form`` refuses, or for scales of another dtype than it stores:
    its own (its attribute ``scales``), else that of the model, ``dtype``; one that ``converts_scales`` takes
    any."""
    if (reason := form.reason_against(spec, shape)) is not None:
        raise SpecError(f"{form.name} can't hold {spec.label()} of shape {list(shape)}", why=reason)
    if getattr(form, "converts_scales", False):
        return
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
