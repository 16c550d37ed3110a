"""A weight with very many rows, such as the head of a large vocabulary, solved some rows at a time.

Rows don't depend on one another: under one Hessian each has a loss of its own. What is in memory in float32
is a part; of the rest there are codes, a byte a weight, until they are packed.
"""

from __future__ import annotations

from typing import Any

import torch

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.finite import squares
from quantkit.formats.spec import QuantSpec
from quantkit.memory.quantize import rows_at_once
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.static_inputs import with_input_factor


def solve(weight: torch.Tensor, method: Method, form: Format, stats: LayerStats | None, spec: QuantSpec,
          options: MethodOptions) -> tuple[QuantizedTensor, float, tuple[str, ...]]:
    """Quantize and pack ``weight`` ``[out, in]``, of any floating dtype, part by part.

    Args:
        weight: the original.
        method, form: which.
        stats: of its inputs, rotated if the spec says so.
        spec: with ``scale_dtype`` resolved.
        options: the method's.

    Returns:
        The packed weight, ``‖W − Ŵ‖ / ‖W‖`` and every fallback taken, once.

    Raises:
        SpecError, CalibrationError: as the method and the format do.
    """
    step = rows_at_once(spec, (weight.shape[0], weight.shape[1]))
    device = stats.device if stats else weight.device
    results = [method.run(_exact(part.to(device), spec), stats, spec, options).to(weight.device)
               for part in weight.split(step)]
    codes = Codes.joined(results, tuple(dict.fromkeys(note for result in results for note in result.notes)))
    del results
    codes = with_input_factor(codes, stats)
    packed = packing.pack(form, codes, weight.dtype)
    off = of = 0.0
    rows: Any = getattr(form, "rows", None)
    stored = packing.dequantize(form, packed) if rows is None else None
    for start in range(0, weight.shape[0], step):
        part = _exact(weight[start:start + step], spec)
        back = rows(packed, torch.arange(start, start + len(part))) if stored is None else stored[
            start:start + step]
        off += squares(back - part)
        of += squares(part)
    packing.require_finite_error(form, off)
    return packed, (off / max(of, 1e-60)) ** 0.5, codes.notes


def _exact(part: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    exact = part.float()
    return apply_hadamard(exact) if spec.rotation else exact
