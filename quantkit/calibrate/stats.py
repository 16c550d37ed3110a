"""Accumulators that watch a layer's input and become its :class:`LayerStats`."""

from __future__ import annotations

import torch

from quantkit.errors import CalibrationError
from quantkit.methods.base import LayerStats

_BLOCK = 384  # columns a multiply: the sum is symmetric, so only blocks on and below the diagonal are made


def require_finite_states(states: torch.Tensor, first: int, where: str) -> None:
    """Hidden states ``[B, T, hidden]`` of the samples from ``first`` on must be finite ``where`` they are.

    Raises:
        CalibrationError: they aren't; sample and place are named.
    """
    if bool(torch.isfinite(states).all()):
        return
    for sample, one in enumerate(states, first):
        if not bool(torch.isfinite(one).all()):
            raise CalibrationError(f"calibration sample {sample} is NaN or infinite after {where}",
                                   why=f"tensor: hidden state {list(one.shape)}, {one.dtype}",
                                   next="use another calibration text, or dtype float32")


class HessianObserver:
    """Sums ``x xᵀ`` over every token that enters a layer. Assign it to ``Linear.observer``.

    One observer stands for all layers that share an input, unless tokens have an importance, which is
    each layer's own. Sums are float32: with 10⁵ tokens the
    rounding is far below the noise of choosing those tokens.

    Args:
        name: the layer watched, for messages.
        importance: float32 ``[tokens]``, a weight on each of all tokens, 1 on average.

    Attributes:
        tokens: how many entered the layer so far.
        first: number of the first token of the forward pass that is under way.
    """

    def __init__(self, name: str, importance: torch.Tensor | None = None) -> None:
        self.name, self.importance, self.tokens, self.first = name, importance, 0, 0
        self._sum: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Take ``x [..., in]``, any floating dtype. Raises CalibrationError if a value isn't finite.

        Args:
            x: what enters the layer.
            tokens: int64 ``[n]``, which of the pass's tokens these are; by default all, in order.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        if not bool(torch.isfinite(rows).all()):
            raise CalibrationError(f"the input of {self.name} holds NaN or infinity",
                                   why=f"{int((~torch.isfinite(rows)).sum())} of {rows.numel()} values",
                                   next="calibrate in float32, or check the model with quantkit eval")
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
        self.tokens += rows.shape[0]

    def result(self) -> LayerStats:
        """The mean over the tokens seen.

        Raises:
            CalibrationError: nothing was seen, or a sum overflowed float32.
        """
        if self._sum is None:
            raise CalibrationError(f"no calibration token reached {self.name}",
                                   next="give more or longer calibration samples")
        hessian = self._sum.tril() + self._sum.tril(-1).T
        hessian /= self.tokens
        if not bool(torch.isfinite(hessian).all()):
            raise CalibrationError(f"the Hessian of {self.name} overflows float32",
                                   why="its inputs are beyond 1e19; the model itself is damaged")
        notes: tuple[str, ...] = ()
        if self.importance is not None and bool((self.importance == 1).all()):
            notes = ("all calibration tokens count the same: no answer of the model depends on it",)
        return LayerStats(self.tokens, hessian, notes)
