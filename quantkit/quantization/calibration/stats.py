"""Accumulators that watch a layer's input and become its :class:`LayerStats`."""

from __future__ import annotations

import torch

from quantkit.formats.finite import all_finite
from quantkit.quantization.calibration.finite import NEXT, require_finite_input
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.hessian import symmetric_
from quantkit.support.errors import CalibrationError

_BLOCK = 384  # columns a multiply: the sum is symmetric, so only blocks on and below the diagonal are made


class HessianObserver:
    """Sums ``x xᵀ`` over every token that enters a layer, and keeps the largest ``|x|``. Assign it to
    ``Linear.observer``.

    One observer stands for all layers that share an input. Sums are float32: with 10⁵ tokens the rounding is
    far below the noise of choosing those tokens.

    Args:
        name: the layer watched, for messages.
        importance: float32 ``[tokens]``, a weight on each of all tokens, 1 on average.
        size: *in*, where it may be that no token comes, as with experts: the result is zeros then.
        form: whether the sum of ``x xᵀ`` is wanted.
        correlation: factor on the Hessian beside its diagonal; below 1 where tokens are no text.

    Attributes:
        original: the input of the layer in the original model for the tokens of the next call,
            ``[…, in]``: how far the two are apart is summed too. A call uses it up.
        tokens: the number of tokens that entered the layer so far.
        first: number of the first token of the forward pass that is under way.
    """

    def __init__(self, name: str, importance: torch.Tensor | None = None, size: int | None = None,
                 form: bool = True, correlation: float = 1.0) -> None:
        self.name, self.importance = name, importance
        self.tokens = self.first = 0
        self._size = size
        self._form, self._correlation = form, correlation
        self._sum: torch.Tensor | None = None
        self._drift: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None
        self.original: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Take ``x [..., in]``, any floating dtype. Raises NonFiniteError if a value isn't finite.

        Args:
            x: the input of the layer.
            tokens: int64 ``[n]``, which of the pass's tokens these are; by default all, in order.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        require_finite_input(rows, self.name)
        if not rows.shape[0]:
            return
        self.tokens += rows.shape[0]
        largest = rows.abs().amax(dim=0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        if not self._form:
            return
        if self._sum is None:
            self._sum = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        weighted = rows
        if self.importance is not None:
            if tokens is None:
                tokens = torch.arange(rows.shape[0], device=rows.device)
            mine = self.importance[self.first + tokens.to(self.importance.device)]
            weighted = rows * mine[:, None].to(rows.device)
        for start in range(0, rows.shape[1], _BLOCK):
            stop = start + _BLOCK
            self._sum[start:stop, :stop].addmm_(weighted[:, start:stop].T, rows[:, :stop])
        if self.original is not None:
            if self._drift is None:
                self._drift = torch.zeros_like(self._sum)
            drift = self.original.reshape(rows.shape).to(torch.float32) - rows
            self._drift.addmm_(drift.T, weighted)
            self.original = None

    def result(self) -> LayerStats:
        """The mean over the tokens seen; once.

        Raises:
            CalibrationError: nothing was seen, or a sum overflowed float32.
        """
        if self._largest is None and self._size is not None:
            form = torch.zeros(self._size, self._size) if self._form else None
            return LayerStats(0, form, torch.zeros(self._size))
        if self._largest is None:
            raise CalibrationError(f"no calibration token reached {self.name}",
                                   next="give more or longer calibration windows: --windows, --window")
        if self._sum is None:
            return LayerStats(self.tokens, None, self._largest)
        hessian, self._sum = symmetric_(self._sum), None  # in place: a copy may be as large as all the rest
        hessian /= self.tokens
        if not all_finite(hessian):
            raise CalibrationError(f"the Hessian of {self.name} overflows float32",
                                   why="its inputs are large throughout; the model itself may be damaged",
                                   next=NEXT)
        drift, self._drift = self._drift, None
        if drift is not None:
            drift /= self.tokens
            if not all_finite(drift):
                raise CalibrationError(f"the drift of {self.name} overflows float32",
                                       why="its inputs in the original model are too large", next=NEXT)
        if self._correlation != 1:
            diagonal = hessian.diagonal().clone()
            hessian.mul_(self._correlation).diagonal().copy_(diagonal)
        notes: tuple[str, ...] = ()
        # an expert may have got tokens of other windows than those that were weighed
        if self.importance is not None and self._size is None and bool((self.importance == 1).all()):
            notes = ("all calibration tokens count the same: no answer of the model depends on it",)
        return LayerStats(self.tokens, hessian, self._largest, notes, drift)
