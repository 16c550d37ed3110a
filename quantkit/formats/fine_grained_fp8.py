"""DeepSeek's fp8 (``quant_method: fp8``): float8_e4m3fn weights with a float32 scale for each square.

====================  =============  ==============================
suffix                dtype          shape
====================  =============  ==============================
``weight``            float8_e4m3fn  ``[out, in]``
``weight_scale_inv``  float32        ``[ceil(out / t), ceil(in / t)]``
====================  =============  ==============================

In spite of its name ``weight_scale_inv`` is what weights are multiplied by. Engines round activations to e4m3
with a scale for each ``t`` values of a token. https://arxiv.org/abs/2412.19437, section 3.3.
"""

from __future__ import annotations

from quantkit.formats.float_quantized import FloatQuantizedFormat
from quantkit.formats.spec import QuantSpec


class FineGrainedFP8Format(FloatQuantizedFormat):
    """See the module's docstring."""

    name, quant_method = "fine-grained-fp8", "fp8"
    strategies = ("tile",)
    suffix, scales, alone = "weight_scale_inv", "float32", True

    def refuses(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """The same, and activations as they are: the standard can't say that they aren't rounded."""
        if (reason := super().refuses(spec, shape)) is None and spec.activations != "group":
            return f"{self.name} is for rounded activations; use activations: group"
        return reason


FORMAT = FineGrainedFP8Format()
