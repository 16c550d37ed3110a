"""What the kernels compute, bit by bit, in NumPy: the same operations on float32 in the same order.

Slow, and short enough to be checked by reading. ``fma`` is exact although NumPy has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit_kernels.cpu.attention import NOTHING, SPLIT, WIDE
from quantkit_kernels.cpu.emit import HIGHEST, LN2_HIGH, LN2_LOW, LOG2E, LOWEST, POLYNOMIAL
from quantkit_kernels.cpu.float_product import CHUNK
from quantkit_kernels.cpu.float_product import LANES as SUM_LANES
from quantkit_kernels.cpu.kv_codecs import lanes
from quantkit_kernels.cpu.rows import GELU, GELU_CUBE, LANES, SMALLEST
from quantkit_kernels.cpu.weight_decoder import SUB, Family

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
F = np.float32


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """``a · b + c`` of float32 numbers, rounded once.

    In float64 the product is exact; the sum is rounded to odd, so that rounding it again is harmless.
    """
    x = np.multiply(a, b, dtype=np.float64)
    y = np.broadcast_to(np.asarray(c, np.float64), np.broadcast(x, c).shape)
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(np.int64).copy()
    odd = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    bits += np.where(odd, np.where((error > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).astype(F)


def halves(x: Floats) -> Floats:
    """The sum over the last axis, whose length is a power of 2: the second half onto the first."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def exp(x: Floats) -> Floats:
    """The kernels' exponential."""
    x = np.maximum(np.minimum(x, F(HIGHEST)), F(LOWEST))
    exponent = np.rint(x * F(LOG2E))
    rest = fma(exponent, F(-LN2_LOW), fma(exponent, F(-LN2_HIGH), x))
    result: Floats = np.full_like(x, F(POLYNOMIAL[0]))
    for factor in POLYNOMIAL[1:]:
        result = fma(result, rest, F(factor))
    result = fma(result, rest * rest, rest + F(1))
    return (result.view(np.int32) + (exponent.astype(np.int32) << 23)).view(F)


def embedding(ids: Ids, table: npt.NDArray[np.int16] | npt.NDArray[np.floating[Any]]) -> Floats:
    """Tokens ``[m]`` → their rows ``[m, n]`` of a table ``[vocab, n]``: float16, float32, or the bits of
    bfloat16."""
    if table.dtype == np.int16:
        return (table[ids].astype(np.int32) << 16).view(F)
    return table[ids].astype(F)


def argmax(values: Floats) -> int | None:
    """The lowest index of the largest of ``[n]``; ``None`` if one is NaN or infinite."""
    return int(values.argmax()) if np.isfinite(values).all() else None


def norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """RMSNorm of rows ``[m, n]``."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    total = np.zeros((len(x), LANES), F)
    for at in range(0, padded.shape[1], LANES):
        part = padded[:, at:at + LANES]
        total = fma(part, part, total)
    factor = F(1) / np.sqrt(halves(total) / F(x.shape[1]) + F(eps))
    return x * factor[:, None] * weight


def turn(x: Floats, signs: Floats, mix: Floats) -> Floats:
    """Rows ``[m, n]`` times ``diag(signs) · (mix ⊗ Hadamard)``."""
    span = x.shape[1] // len(mix)
    turned = (x * signs).reshape(len(x), len(mix), span)
    step = 1
    while step < span:
        pairs = turned.reshape(len(x), len(mix), -1, 2, step)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        turned = np.stack((left + right, left - right), axis=-2).reshape(turned.shape)
        step *= 2
    if len(mix) > 1:
        total = turned[:, :1] * mix[:, 0, None]
        for i in range(1, len(mix)):
            total = total + turned[:, i:i + 1] * mix[:, i, None]
        turned = total
    scaled: Floats = (turned * F(span**-0.5)).reshape(x.shape)
    return scaled


def silu_mul(gate: Floats, up: Floats) -> Floats:
    """``silu(gate) · up``."""
    return gate / (exp(-gate) + F(1)) * up


def gelu_mul(gate: Floats, up: Floats) -> Floats:
    """``gelu(gate) · up``, GELU by tanh."""
    inner = (gate * gate * F(GELU_CUBE) + F(1)) * gate * F(GELU)
    return gate / (exp(-inner) + F(1)) * up


def quantize(x: Floats, family: Family) -> tuple[Whole, Floats, Whole]:
    """Rows ``[m, k]``, k a multiple of 32 → codes ``[m, k]``, scales ``[m, k / 32]`` and sums of codes, of
    each 32, then of each 16: ``[m, 3 k / 32]``."""
    parts = x.reshape(len(x), -1, SUB)
    top = np.maximum(np.abs(parts).max(-1), F(SMALLEST))
    inverse = F(family.levels) / top
    codes = np.rint(parts * inverse[..., None]).astype(np.int32)
    sums = [codes.reshape(len(x), -1, size).sum(-1, dtype=np.int32) for size in (SUB, SUB // 2)]
    return codes.reshape(x.shape), top / F(family.levels), np.concatenate(sums, axis=1)


def quantize_row(x: Floats, family: Family) -> tuple[Floats, Floats]:
    """Rows ``[m, k]`` → levels ``[m, k]``, whole numbers or e4m3's, and one scale a row ``[m, 1]``."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), F(SMALLEST)) / F(family.levels)
    exact = x / scale
    if family.sums_rows:
        return np.rint(exact), scale
    exponent = np.maximum(exact.view(np.int32) & 0x7F800000, 121 << 23)
    large = (exponent + (20 << 23)).view(F) * F(1.5)
    return (exact + large) - large, scale


def token_matmul(x: Floats, levels: Floats, scale: Floats, family: Family) -> Floats:
    """Rows ``[m, k]``, each with one scale, by weights' levels ``[n, k]`` with a scale a row ``[n, 1]``."""
    rows, steps = quantize_row(x, family)
    if family.sums_rows:
        return (rows.astype(np.int64) @ levels.T.astype(np.int64)).astype(F) * steps * scale[:, 0]
    total = np.zeros((len(x), len(levels)), F)
    chunk = chunk_of(x.shape[1])
    for start in range(0, x.shape[1], chunk):
        part = slice(start, start + chunk)
        total = total + float_matmul(rows[:, part], levels[:, part]) * steps * scale[:, 0]
    return total


def integer_matmul(x: Floats, levels: Whole, scale: Floats, family: Family, group: int,
                   minimum: Floats | None = None) -> Floats:
    """Rows by integer weights.

    Args:
        x: the rows, ``[m, k]``.
        levels: ``[n, k]``, zero point subtracted.
        scale: ``[n, k / group]``; ``[n, 1]`` with group 0.
        family: the activations' family.
        group: weights that share a scale; 0: a row.
        minimum: like scale: what is added to every weight of a group.

    Returns:
        ``[m, n]``.
    """
    codes, steps, _ = quantize(x, family)
    total = np.zeros((len(x), len(levels)), F)
    span = min(group or SUB, SUB)
    for at in range(0, x.shape[1], span):
        part = slice(at, at + span)
        products = (codes[:, part].astype(np.int64) @ levels[:, part].T.astype(np.int64)).astype(np.int32)
        step = steps[:, at // SUB, None]
        if group:
            total = fma(products.astype(F) * step, scale[None, :, at // group], total)
            if minimum is not None:
                sums = codes[:, part].sum(1, dtype=np.int32).astype(F)
                total = fma(sums[:, None] * step, minimum[None, :, at // group], total)
        else:
            total = fma(products.astype(F), step, total)
    return total if group else total * scale[:, 0]


def bfloat(x: Floats) -> Floats:
    """Rounded to bfloat16, half to even."""
    words = x.view(np.uint32)
    rounded: Floats = (words + 0x7FFF + (words >> 16 & 1) & np.uint32(0xFFFF0000)).view(F)
    return rounded


def chunk_of(columns: int, group: int = 0) -> int:
    """Columns of a chunk: as few chunks as there may be, of whole groups."""
    whole = group or SUB
    chunks = -(-columns // (max(1, CHUNK // whole) * whole))
    return -(-columns // whole // chunks) * whole


def float_matmul(x: Floats, weight: Floats, pairs: bool = False, *, scale: Floats | None = None,
                 group: int = 0, times: Floats | None = None) -> Floats:
    """Rows ``[m, k]`` by ``[n, k]``, a chunk of columns after another: 16 chains, then their halves.

    Args:
        x, weight: the two factors.
        pairs: whether a chain takes neighbors, the odd one first; else what lies 16 apart.
        scale: of tiles, ``[n, k / group]``.
        group: columns that share a scale; 0: there are none.
        times: what a chunk's sums are multiplied by, ``[m, n]``.
    """
    total = np.zeros((len(x), len(weight)), F)
    chunk = chunk_of(x.shape[1], group)
    for start in range(0, x.shape[1], chunk):
        end = min(start + chunk, x.shape[1])
        lanes = np.zeros((len(x), len(weight), SUM_LANES), F)
        for first in range(start, end, group or chunk):
            chain = np.zeros_like(lanes) if group else lanes
            for at in range(first, min(first + (group or chunk), end), SUB):
                for part in ((slice(at + 1, at + SUB, 2), slice(at, at + SUB, 2)) if pairs else
                             (slice(at, at + SUM_LANES), slice(at + SUM_LANES, at + SUB))):
                    chain = fma(weight[None, :, part], x[:, None, part], chain)
            lanes = chain if scale is None else fma(chain, scale[None, :, first // group, None], lanes)
        sums = halves(lanes)
        total = total + (sums if times is None else sums * times)
    return total


def tile_matmul(x: Floats, weight: Floats, total: Floats) -> Floats:
    """Rows ``[m, k]`` by ``[n, k]`` by AMX, a chunk of columns after another added to ``total`` ``[m, n]``:
    of each tile's columns the even ones are a chain, and the odd ones another."""
    chunk = chunk_of(x.shape[1])
    for start in range(0, x.shape[1], chunk):
        sums = np.zeros_like(total)
        for at in range(start, min(start + chunk, x.shape[1]), SUB):
            even, odd = np.zeros_like(total), np.zeros_like(total)
            for k in range(at, at + SUB, 2):
                even = fma(weight[None, :, k], x[:, k, None], even)
                odd = fma(weight[None, :, k + 1], x[:, k + 1, None], odd)
            sums = sums + (even + odd)
        total = total + sums
    return total


def rotate(x: Floats, cos: Floats, sin: Floats, scale: float | None = None) -> Floats:
    """``[..., D]`` by angles ``[..., D / 2]``."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
    return turned if scale is None else turned * F(scale)


def attend(q: Floats, k: Floats, v: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """One head.

    Args:
        q: ``[T, D]``, rotated and scaled.
        k, v: ``[S, D]``, as the codec gives them back.
        seen: whether each query sees each slot, ``[T, S]``.

    Returns:
        ``[T, D]``.
    """
    dim, width = q.shape[1], lanes(q.shape[1])
    maximum = np.full(len(q), NOTHING, F)
    weight, total = np.zeros(len(q), F), np.zeros_like(q)
    for begin in range(0, len(k), SPLIT):
        keys, values, visible = k[begin:begin + SPLIT], v[begin:begin + SPLIT], seen[:, begin:begin + SPLIT]
        lane = q[:, None, :width] * keys[None, :, :width]
        for at in range(width, dim, width):
            lane = fma(q[:, None, at:at + width], keys[None, :, at:at + width], lane)
        scores = np.where(visible, halves(lane), F(NOTHING))
        top = scores.max(-1)
        chances = np.where(scores > NOTHING, exp(scores - top[:, None]), F(0))
        padded = np.pad(chances, ((0, 0), (0, -chances.shape[1] % WIDE)))
        sums = np.zeros((len(q), WIDE), F)
        for at in range(0, padded.shape[1], WIDE):
            sums = sums + padded[:, at:at + WIDE]
        total_of_split = np.zeros_like(q)
        for i in range(len(keys)):
            total_of_split = fma(chances[:, i, None], values[i], total_of_split)
        occupied = top > NOTHING
        new = np.maximum(maximum, top)
        keep, take = exp(maximum - new), exp(top - new)
        weight = np.where(occupied, fma(halves(sums), take, weight * keep), weight)
        total = np.where(occupied[:, None], fma(total_of_split, take[:, None], total * keep[:, None]), total)
        maximum = np.where(occupied, new, maximum)
    return total * (F(1) / weight)[:, None]
