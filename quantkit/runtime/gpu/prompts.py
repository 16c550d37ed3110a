"""Products of a prompt's rows: a weight is dequantized once, and a library multiplies.

A library adds up a row's products in an order that depends on how many rows there are, and may depend on
where the row stands. So rows are padded to a few sizes, and of these only the ones are used that give a row
the same bits, wherever it stands: that is tried out with each shape of weights when it is first multiplied. A
weight for which no size does is multiplied by our kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from quantkit.runtime.memory.scratch import GPU_LEAST, GPU_ROWS

if TYPE_CHECKING:
    from quantkit_kernels.triton.levels import QuantizedActivations
    from quantkit_kernels.triton.matmul import Gate
    from quantkit_kernels.triton.packed import TritonWeight

USUAL = 512
"""Rows of the size that the others are compared with."""
SIZES = (GPU_LEAST, USUAL, GPU_ROWS)
"""Rows that go through a library's product at once."""
_ELSEWHERE = 37
"""Rows by which others are moved, to see whether their place makes a difference: no tile's size divides
it."""


class PromptProducts:
    """Multiplies a prompt's rows, however many there are, so that a row's bits depend on nothing else.

    Args:
        numbers: of the largest weight that is dequantized; memory for these is taken at once.
        dtype, device: of activations and of the dequantized weight.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._scratch = torch.empty(numbers, dtype=dtype, device=device)
        self._proven: dict[tuple[object, ...], tuple[int, ...]] = {}

    @property
    def nbytes(self) -> int:
        return self._scratch.numel() * self._scratch.element_size()

    def multiply(self, x: torch.Tensor | QuantizedActivations, w: TritonWeight, *,
                 bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
                 out: torch.Tensor | None = None, gated: Gate | None = None) -> torch.Tensor | None:
        """``y = x Wᵀ`` and what follows, see :func:`quantkit_kernels.triton.matmul.multiply`; it is rounded
        before the bias's neighbor is added where there are both, and before a gate opens. Levels' sums are
        rounded once, as there.

        Returns:
            ``[m, outputs]``; ``None`` if a library can't multiply this weight.
        """
        from quantkit_kernels.triton import dequantize

        if not isinstance(x, torch.Tensor):
            return self._multiply_levels(x, w, bias, residual, out, gated)
        key = "numbers", w.n, w.k, bias is not None, residual is not None
        if (dequantize.reason_against(w) is not None or w.n * w.k > self._scratch.numel()
                or self._proven.get(key) == ()):
            return None
        weight = dequantize.dequantize(w, self._scratch).T
        with _whole_sums():
            if key not in self._proven:
                self._proven[key] = _proven_sizes(weight, bias, residual is not None)
            if not (sizes := self._proven[key]):
                return None
            y = _padded_product(x, weight, bias, residual, sizes)
        if gated is not None:
            return dequantize.apply_gate(y, gated)
        return y if out is None else out.copy_(y)

    def _multiply_levels(self, x: QuantizedActivations, w: TritonWeight, bias: torch.Tensor | None,
                         residual: torch.Tensor | None, out: torch.Tensor | None, gated: Gate | None
                         ) -> torch.Tensor | None:
        from quantkit_kernels.triton import dequantize

        rows, levels = dequantize.packed_rows(w), self._scratch.view(torch.uint8)
        key = w.mode, rows, w.k
        if (dequantize.reason_against_levels(w) is not None or rows * w.k > len(levels) or w.k % 16
                or self._proven.get(key) == ()):
            return None
        weight = dequantize.levels_of(w, levels).T
        if key not in self._proven:
            self._proven[key] = _level_sizes(weight)
        if not (sizes := self._proven[key]):
            return None
        m, start = len(x.values), 0
        y = torch.empty(m, w.outputs, dtype=x.dtype, device=x.values.device) if out is None else out
        for size in _portions(m, sizes):
            here = slice(start, min(start + size, m))
            values = x.values[here].view(torch.int8)  # not everything is done with 8-bit floats
            sums = _level_sums(pad(values, (0, 0, 0, size - len(values))).view(x.values.dtype), weight)
            dequantize.finish_sums(sums[:len(values)], x.scale[here], w, y[here], bias=bias, gated=gated,
                                   residual=None if residual is None else residual[here])
            start += size
        return y


def _level_sizes(weight: torch.Tensor) -> tuple[int, ...]:
    """The sizes at which levels ``[k, n]`` may be multiplied; none if this machine's library can't."""
    try:
        if weight.dtype != torch.int8:
            return _proven_sizes(weight)
        _level_sums(weight.new_zeros(min(SIZES), len(weight)), weight)
    except RuntimeError:
        return ()
    return SIZES  # sums of whole numbers don't depend on their order


def _level_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Levels ``[m, k]`` by ``[k, n]`` → int32 or float32 ``[m, n]``."""
    if x.dtype == torch.int8:
        return torch._int_mm(x, weight)
    unit = torch.ones((), device=x.device)
    return torch._scaled_mm(x, weight, unit, unit, out_dtype=torch.float32, use_fast_accum=False)


def _padded_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                    residual: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor:
    """``x [m, k]`` by ``weight [k, n]``, in portions of these sizes."""
    m = len(x)
    portions = list(_portions(m, sizes))
    rows = sum(portions)
    if rows > m:
        x = pad(x, (0, 0, 0, rows - m))
        residual = None if residual is None else pad(residual, (0, 0, 0, rows - m))
    y = x.new_empty(rows, weight.shape[1])
    start = 0
    for size in portions:
        here = slice(start, start + size)
        _product(x[here], weight, bias, None if residual is None else residual[here], y[here])
        start += size
    return y[:m]


def _portions(m: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """Sizes that together have room for m rows; one that is twice as large as needed, rather than several."""
    while m > 0:
        size = max((size for size in sizes if size <= m), default=min(sizes))
        above = min((size for size in sizes if size >= m), default=size)
        size = above if above < 2 * m else size
        yield size
        m -= size


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
             out: torch.Tensor) -> None:
    added = bias if residual is None else residual
    if added is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(added, x, weight, out=out)
    if bias is not None and residual is not None:
        out += bias


def _proven_sizes(weight: torch.Tensor, bias: torch.Tensor | None = None,
                  has_residual: bool = False) -> tuple[int, ...]:
    """The sizes at which every row has the bits that it has at the beginning of :data:`USUAL`, wherever it
    stands: drawn rows come again and again, at two sets of places."""
    k, n = weight.shape
    count = min(SIZES)
    generator = torch.Generator(weight.device).manual_seed(0)

    def drawn(columns: int) -> torch.Tensor:
        rows = torch.randn(count, columns, generator=generator, device=weight.device)
        return rows.to(weight.dtype)

    x, residual = drawn(k), drawn(n) if has_residual else None
    levels = weight.dtype == torch.float8_e4m3fn

    def product(size: int, moved: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and which drawn row each one is of."""
        order = (torch.arange(size, device=weight.device) - moved) % count
        if levels:
            return _level_sums(x.view(torch.int8)[order].view(x.dtype), weight), order
        out = x.new_empty(size, n)
        _product(x[order], weight, bias, None if residual is None else residual[order], out)
        return out, order

    usual = product(USUAL, 0)[0][:count]

    def is_usual(out: torch.Tensor, order: torch.Tensor) -> bool:
        return all(torch.equal(rows, usual[drawn_rows])
                   for rows, drawn_rows in zip(out.split(count), order.split(count)))

    return tuple(size for size in SIZES if all(is_usual(*product(size, moved)) for moved in (0, _ELSEWHERE)))


@contextmanager
def _whole_sums() -> Iterator[None]:
    """Partial sums of 16 bits, which torch allows by default, aren't as exact as ours."""
    of = torch.backends.cuda.matmul
    before = of.allow_bf16_reduced_precision_reduction, of.allow_fp16_reduced_precision_reduction
    of.allow_bf16_reduced_precision_reduction = of.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        of.allow_bf16_reduced_precision_reduction, of.allow_fp16_reduced_precision_reduction = before
