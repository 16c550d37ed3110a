"""Which torch dtype a spec's scales are kept in."""

from __future__ import annotations

from typing import cast

import torch

from quantkit.errors import SpecError
from quantkit.spec import QuantSpec, ScaleDtype

FLOATS: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, ``float16`` or ``float32``. Raises SpecError for any other dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise SpecError(f"a weight of dtype {name} can't be quantized", why=f"known: {', '.join(FLOATS)}")
    return name


def scale_dtype(spec: QuantSpec, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of ``spec``'s scales for a model of ``dtype``."""
    return FLOATS[dtype_name(dtype) if spec.scale_dtype == "model" else spec.scale_dtype]


def resolve(spec: QuantSpec, dtype: torch.dtype = torch.float32) -> QuantSpec:
    """``spec`` with ``scale_dtype`` ``"model"`` replaced by the model's dtype."""
    if spec.scale_dtype != "model":
        return spec
    return spec.model_copy(update={"scale_dtype": cast(ScaleDtype, dtype_name(dtype))})
