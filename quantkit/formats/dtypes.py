"""Which torch dtype a spec's scales are kept in, and what dtypes are called."""

from __future__ import annotations

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.support.errors import SpecError

FLOATS: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def plain_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``: of any dtype, for messages."""
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, ``float16`` or ``float32``. Raises SpecError for any other dtype."""
    name = plain_name(dtype)
    if name not in FLOATS:
        raise SpecError(f"a weight of dtype {name} can't be quantized", why=f"known: {', '.join(FLOATS)}")
    return name


def scale_dtype(spec: QuantSpec, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of ``spec``'s scales for a model of ``dtype``."""
    return FLOATS[dtype_name(dtype) if spec.scale_dtype == "model" else spec.scale_dtype]


def resolve(spec: QuantSpec, dtype: torch.dtype = torch.float32, form: object = None) -> QuantSpec:
    """``spec`` with ``scale_dtype`` ``"model"`` replaced: by the dtype that the format ``form`` keeps all
    scales in (its attribute ``scales``), else by the model's."""
    if spec.scale_dtype != "model":
        return spec
    return spec.model_copy(update={"scale_dtype": getattr(form, "scales", None) or dtype_name(dtype)})
