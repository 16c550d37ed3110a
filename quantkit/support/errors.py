"""Errors that say what failed, why, and the next command to type.

Every error that a user can cause is a :class:`QuantkitError`. The command line prints its three
parts and exits with ``exit_code``; a traceback appears only under ``--debug``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LISTED = 12
"""Names that a message lists at most."""
DONE = 0
FAILED = 1
USAGE = 2
RESUMABLE = 75
INTERRUPTED = 130


class QuantkitError(Exception):
    """Something a person can act on.

    Args:
        what: one sentence that says what failed, naming the file, layer or option.
        why: the cause, when known.
        next: the remedy: a command to type, or one sentence.
    """

    exit_code = FAILED

    def __init__(self, what: str, *, why: str | None = None, next: str | None = None) -> None:
        self.what = what
        self.why = why
        self.next = next
        super().__init__("\n".join(filter(None, (what, why, next))))


class UsageError(QuantkitError):
    """The command line, a recipe's options or an argument is off."""

    exit_code = USAGE


class SourceError(QuantkitError):
    """A model's source is missing, incomplete, malformed or hostile."""


class UnsupportedModelError(QuantkitError):
    """The architecture, or a config key that changes its maths, is not implemented."""


class RecipeError(QuantkitError):
    """A recipe is malformed or doesn't fit the model."""

    exit_code = USAGE


class SpecError(QuantkitError):
    """A bit width, grouping or layout that a method, format or layer can't take."""

    exit_code = USAGE


class PluginError(QuantkitError):
    """A plugin breaks a rule of the registry: a collision, a misspelled hook, a wrong type."""


class CheckpointError(QuantkitError):
    """A checkpoint can't be written, or what was read is not what was written."""


class CalibrationError(QuantkitError):
    """Calibration data is unusable, or produced a non-finite value."""


class Stopped(QuantkitError):
    """Work stopped on request; what was finished is kept and the same command resumes it."""

    exit_code = RESUMABLE


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``word``, for "did you mean"."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that lists the known names, of many the :data:`LISTED` that resemble ``word`` most."""
    known = sorted(known)
    close = nearest(word, known)
    listed = known if len(known) <= LISTED else sorted(sorted(
        known, key=lambda name: -difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio())[:LISTED])
    more = f" and {len(known) - len(listed)} more" if len(known) > len(listed) else ""
    return (f"did you mean {close!r}? " if close else "") + f"known: {', '.join(listed) or 'none'}{more}"
