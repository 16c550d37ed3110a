"""PyramidKV: SnapKV with more positions in low layers than in high ones, https://arxiv.org/abs/2406.02069."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from quantkit.kv.base import PolicyView
from quantkit.kv.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """The budget is the mean over layers; from the first layer to the last it falls by equal steps.

    Attributes:
        beta: the last layer keeps the mean divided by ``beta``, unless the first layer would then keep more
            than there is.
    """

    name: ClassVar[str] = "pyramidkv"
    uniform_budget: ClassVar[bool] = False
    beta: float = Field(default=20, ge=1, le=1000)

    def layer_budget(self, view: PolicyView) -> int:
        """The budget of a layer. All are equal where the pyramid's top would be narrower than the window."""
        mean = super().layer_budget(view)
        if view.layers == 1:
            return mean
        smallest = mean / self.beta
        largest = min(2 * mean - smallest, view.prompt - self.window)
        smallest = 2 * mean - largest
        if not view.prompt >= largest >= smallest >= self.window:
            return mean
        return round(largest - (largest - smallest) * view.layer / (view.layers - 1))
