"""The exponential of float32 vectors, the same bits on every machine."""

from __future__ import annotations

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, I32, Value, vec

LOWEST, HIGHEST = -87.0, 88.0
"""Below, the result is that of LOWEST (1.6e-38); above, that of HIGHEST (1.7e38)."""
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
              5.0000001201e-1)
"""Of Cephes' expf: (exp(r) - 1 - r) / r² for |r| ≤ ln(2) / 2; at most 2 units in the last place in all."""


def exp(e: Emitter, x: Value) -> Value:
    """``exp(x)``, lane by lane; x is finite."""
    kind = x.type
    x = e.max(e.min(x, e.const(kind, HIGHEST)), e.const(kind, LOWEST))
    exponent = e.round(x * LOG2E)
    rest = e.fma(exponent, e.const(kind, -LN2_LOW), e.fma(exponent, e.const(kind, -LN2_HIGH), x))
    result = e.const(kind, POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        result = e.fma(result, rest, e.const(kind, factor))
    result = e.fma(result, rest * rest, rest + 1.0)
    words = vec(I32, x.lanes) if x.lanes > 1 else I32
    return (result.bits(words) + (e.whole(exponent) << 23)).bits(vec(F32, x.lanes) if x.lanes > 1 else F32)
