"""Keep every position."""

from __future__ import annotations

from typing import ClassVar

from quantkit.kv.base import KVPolicy


class KeepAll(KVPolicy):
    """Nothing is ever dropped."""

    name: ClassVar[str] = "all"
    keeps_all: ClassVar[bool] = True
