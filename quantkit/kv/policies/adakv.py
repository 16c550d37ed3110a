"""Ada-KV: SnapKV with a layer's positions shared among its heads, https://arxiv.org/abs/2407.11550."""

from __future__ import annotations

from typing import ClassVar

from quantkit.kv.policies.score_policy import SharedBudget
from quantkit.kv.policies.snapkv import SnapKV


class AdaKV(SharedBudget, SnapKV):
    """SnapKV's scores; the positions with the best scores of all heads together stay."""

    name: ClassVar[str] = "adakv"
