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
    if (reason := form.refuses(spec, shape)) is not None:
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
