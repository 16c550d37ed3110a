"""Recognizes the folder of a run that isn't finished, and says whether it still runs and how to go on."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Any

from quantkit.checkpoint.durable import is_locked
from quantkit.checkpoint.manifest import MANIFEST, MAX_BYTES
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.support.strict_json import read_object

PARTIAL = ".partial"
STATE = "state.json"
LOCK = "lock"


def is_unfinished(folder: Path) -> bool:
    """Whether a writer is at work in it, or was."""
    place = folder.resolve()
    if place.parent.suffix == PARTIAL and (place.parent / STATE).is_file():
        return True  # what a writer puts together, at whatever stage
    return not (folder / MANIFEST).is_file() and (place.suffix == PARTIAL or (folder / STATE).is_file())


def refuse_unfinished(out: Path) -> None:
    """Raise CheckpointError if nothing is at ``out``, but a run that will make it has begun."""
    if os.path.lexists(out) or not out.name:
        return
    try:
        partial = out.with_name(out.name + PARTIAL)
        begun = partial.is_dir() and ((partial / STATE).is_file() or (partial / LOCK).is_file())
    except (OSError, ValueError):  # no folder can have that name
        return
    if begun:
        raise unfinished(partial, f"{out} isn't finished")


def unfinished(folder: Path, what: str) -> CheckpointError:
    """The error for what an unfinished run left: what it makes of what, and the command to type.

    Args:
        folder: the run's, ``OUT.partial``, or the one inside that is being assembled.
        what: the sentence that says that something can't be used.
    """
    partial = folder
    if not (folder / STATE).is_file() and (folder.resolve().parent / STATE).is_file():
        partial = folder.resolve().parent
    source, recipe, command = _run_of(partial)
    units = sum(not path.name.startswith("part-work-") for path in partial.glob("part-*.json"))
    kept = f"{units} finished unit{'' if units == 1 else 's'}"
    verb = "is" if units == 1 else "are"
    made = (f", of {source}" if source else "") + (f" by recipe {recipe}" if recipe else "")
    place = partial.resolve()
    out = (partial if partial.name == place.name else place).with_name(place.name.removesuffix(PARTIAL))
    option = "" if command == "export" else "--out "
    again = f"quantkit {command} {quote(source or 'SOURCE')} … {option}{quote(str(out))}"
    if is_locked(partial / LOCK):
        return CheckpointError(what, why=f"a run is writing it now{made}: {kept} so far, in {partial}",
                               next="wait for the run to end")
    return CheckpointError(
        what, why=f"the run that was writing it stopped{made}: {kept} {verb} kept in {partial}",
        next=f"type the command that was stopped once more, {again}: it goes on where it was")


def _run_of(partial: Path) -> tuple[str | None, str | None, str]:
    """The model, the recipe's name and the command of a run, as far as its folder says."""
    try:
        state = read_object(partial / STATE, MAX_BYTES, error=CheckpointError)
    except QuantkitError:
        return None, None, "quantize"
    identity = _table(state.get("identity"))
    source, recipe = (_text(_table(identity.get(kind)).get(key)) for kind, key in (("source", "uri"),
                                                                                   ("recipe", "name")))
    if exported := _table(identity.get("exported")):
        return _text(exported.get("uri")), None, "export"
    return source, recipe, "quantize"


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) < 200 else None
