"""Describes how two runs differ: the field, its old and its new value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 8
LONGEST = 48
"""Characters of a value; of longer ones beginning and end are shown."""
_KEYS = ("match", "name", "text")
"""Fields by which entries of a list are known, wherever they stand."""
_FIRST = ("layout", "quantkit_version", "plugins", "source.uri", "source.revision", "source", "exported",
          "format", "recipe", "calibration")
_WORDS = (("quantkit_version", "quantkit"), ("plugins.", "plugin "), ("source.files.", "the model's "),
          ("source.uri", "model"), ("source.", "model: "), ("recipe.", "recipe: "),
          ("calibration.files", "calibration file "), ("calibration.sha256", "calibration's tokens"),
          ("calibration.", "calibration: "), ("exported.", "checkpoint: "), ("format", "--to"), ("", ""))


@dataclass(frozen=True)
class Difference:
    """A field of two pieces of JSON data; ``then`` or ``now`` is ``None`` where there was no such field."""

    field: str
    then: Any
    now: Any

    def __str__(self) -> str:
        start, words = next(pair for pair in _WORDS if self.field.startswith(pair[0]))
        name = words + self.field.removeprefix(start) if not words or words[-1] == " " else words
        return f"{name}: {_short(self.then)} → {_short(self.now)}"


def differences(then: Any, now: Any, field: str = "") -> list[Difference]:
    """The leaves in which two pieces of JSON data differ, entries of lists by their names if they have any.

    Args:
        then, now: plain JSON data.
        field: the text to put before the names of fields.
    """
    if isinstance(then, list) and isinstance(now, list):
        then, now = _keyed(then, now)
    if isinstance(then, dict) and isinstance(now, dict):
        return [difference for key in dict.fromkeys([*now, *then])
                for difference in differences(then.get(key), now.get(key), _inside(field, str(key)))]
    return [] if then == now else [Difference(field, then, now)]


def _inside(field: str, key: str) -> str:
    return f"{field}.{key}" if field and not key.startswith("[") else field + key


def changed_lines(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """At most :data:`SHOWN` lines for people: what was chosen, not what follows from it.

    Args:
        then: the identity of the run that was begun.
        now: the identity of the run that would take over.
    """
    changes = differences(then, now)
    chosen = {change.field for change in changes}
    causes = [change for change in changes if not change.field.startswith("calibration.coverage")
              and change.field != "plugins.quantkit" and f"recipe.{change.field}" not in chosen]
    changes = causes or changes
    changes.sort(key=lambda change: _rank(change.field))
    more = [f"and {len(changes) - SHOWN + 1} more"] if len(changes) > SHOWN else []
    return [*map(str, changes[:SHOWN - len(more)]), *more]


def pinned(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which versions must be installed again so that the run that was begun can be ended."""
    versions, present = ({**(record.get("plugins") or {}), "quantkit": record.get("quantkit_version")}
                         for record in (then, now))
    return [f"{name} {version}" for name, version in versions.items()
            if version and name in present and present[name] != version]


def _rank(field: str) -> int:
    return next((i for i, start in enumerate(_FIRST) if field.startswith(start)), len(_FIRST))


def _keyed(then: Sequence[Any], now: Sequence[Any]) -> tuple[Any, Any]:
    """Two lists as tables: by a field that names their entries, or by place if there are as many."""
    for key in _KEYS:
        tables: list[dict[str, Any]] = [
            {f"[{entry[key]}]": entry for entry in side if isinstance(entry, dict) and key in entry}
            for side in (then, now)]
        if [len(table) for table in tables] == [len(then), len(now)]:
            orders = [[name for name in table if name in tables[0] and name in tables[1]] for table in tables]
            for table, order in zip(tables, orders, strict=True):
                table["[order]"] = " ".join(order)
            return tables[0], tables[1]
    if len(then) == len(now):
        placed = [{f"[{place}]": entry for place, entry in enumerate(side)} for side in (then, now)]
        return placed[0], placed[1]
    return then, now


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if re.fullmatch(r"[0-9a-f]{40,64}", text):
        return text[:12] + "…"
    return text if len(text) <= LONGEST else f"{text[:LONGEST - 16]}…{text[-15:]}"
