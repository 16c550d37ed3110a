"""Carries a replica's error through Ray Serve, which keeps only the text of what a constructor raises."""

from __future__ import annotations

import base64
import json
import re

from quantkit.support.errors import QuantkitError

_MARK = re.compile(r"quantkit-failure:([A-Za-z0-9+/=]+)")


class LoadFailure(Exception):
    """A replica couldn't load its models. Its text holds the error's three parts and exit code."""

    @classmethod
    def of(cls, error: QuantkitError) -> LoadFailure:
        """One that carries ``error``."""
        parts = json.dumps([error.what, error.why, error.next, error.exit_code])
        return cls(f"quantkit-failure:{base64.b64encode(parts.encode()).decode()}")


def carried_error(text: str) -> QuantkitError | None:
    """The error that a text of Ray Serve's carries, if there is one."""
    match = _MARK.search(text)
    if match is None:
        return None
    what, why, next, exit_code = json.loads(base64.b64decode(match[1]))
    error = QuantkitError(what, why=why, next=next)
    error.exit_code = exit_code
    return error
