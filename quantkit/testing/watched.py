"""Statistics and options that note what a method reads of them."""

from __future__ import annotations

from typing import Any

import torch

from quantkit.quantization.methods.base import LayerStats, MethodOptions

STATISTICS = ("hessian", "largest", "drift")
"""What a method may need. A transform is never given ``drift``."""


class WatchedStats(LayerStats):
    """Statistics that note in ``reads`` which of :data:`STATISTICS` were read."""

    reads: set[str]

    def __init__(self, stats: LayerStats) -> None:
        super().__init__(stats.tokens, stats.hessian, stats.largest, stats.notes, stats.drift)
        object.__setattr__(self, "reads", set())

    def __getattribute__(self, name: str) -> Any:
        if name in STATISTICS:
            object.__getattribute__(self, "reads").add(name)
        return object.__getattribute__(self, name)

    @property
    def device(self) -> torch.device:
        """A CPU, without reading any statistic."""
        return torch.device("cpu")

    def to(self, device: torch.device) -> LayerStats:
        """The same: these stay on the CPU."""
        return self


def watched_options(options: MethodOptions, reads: set[str]) -> MethodOptions:
    """The same options, of a subclass of their type that adds each option's name to ``reads`` when it is
    read; all of them where they are read as a whole."""
    before = set(reads)
    kind = type(options)
    fields = set(kind.model_fields)

    def read(self: MethodOptions, name: str) -> Any:
        if name in fields:
            reads.add(name)
        elif name in ("__dict__", "model_copy") or name.startswith("model_dump"):
            reads.update(fields)
        return kind.__getattribute__(self, name)

    watching: Any = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})
    same: MethodOptions = watching(**{name: getattr(options, name) for name in fields})
    reads.intersection_update(before)  # making it may have read them, too
    return same
