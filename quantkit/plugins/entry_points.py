"""Which entry points of plugins are installed, and whose they are."""

from __future__ import annotations

import importlib.metadata
import warnings

from quantkit.plugins.registry import described

ENTRY_POINTS = "quantkit"
"""The group."""


def entry_points() -> list[importlib.metadata.EntryPoint]:
    """Every entry point of the group; a distribution whose file of entry points is malformed has none."""
    try:
        return list(importlib.metadata.entry_points(group=ENTRY_POINTS))
    except Exception:  # one file that can't be parsed hides all distributions' entry points
        points, seen = [], set()
        for dist in importlib.metadata.distributions():
            try:
                name = dist.name
                new = [] if name in seen else [p for p in dist.entry_points if p.group == ENTRY_POINTS]
                seen.add(name)
            except Exception as error:
                where = getattr(dist, "_path", "a distribution")
                warnings.warn(f"entry points of {where} can't be read: {described(error)}", stacklevel=2)
                continue
            points += new
        return points


def distribution_of(point: importlib.metadata.EntryPoint, module: str) -> tuple[str, str]:
    """Name and version of the distribution that an entry point is of."""
    try:
        name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    except Exception:  # no metadata, or a malformed one
        name = version = ""
    return name or module, version or "unknown"
