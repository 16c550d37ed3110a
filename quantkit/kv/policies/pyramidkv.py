"""PyramidKV: SnapKV with more positions in low layers, fewer in high ones,
https://arxiv.org/abs/2406.02069."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from quantkit.kv.base import PolicyView
from quantkit.kv.policies.scores import tokens
from quantkit.kv.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """The budget is the layers' mean; from the first to the last it falls by equal steps.

    Attributes:
        beta: the last layer keeps the mean over this, unless the first then kept more than there is.
    """

    name: ClassVar[str] = "pyramidkv"
    uniform_budget: ClassVar[bool] = False
    beta: float = Field(default=20, ge=1, le=1000)

    def share(self, held: PolicyView) -> int:
        """By the layer; the same in all of them where the pyramid's top were narrower than the window."""
        mean = tokens(self.budget, held.prompt)
        if held.layers == 1:
            return mean
        least = mean / self.beta
        most = min(2 * mean - least, held.prompt - self.window)
        least = 2 * mean - most
        if not held.prompt >= most >= least >= self.window:
            return mean
        return round(most - (most - least) * held.layer / (held.layers - 1))
