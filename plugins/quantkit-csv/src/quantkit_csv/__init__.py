"""CSV as a quantkit plugin. This file only says where things are."""

from __future__ import annotations

from quantkit.plugins.hooks import Register, hookimpl

QUANTKIT_API = 1


@hookimpl
def register_reporters(register: Register) -> None:
    register("csv", "quantkit_csv.reporter:REPORTER")
