"""Importance-weighted rounding as a quantkit plugin. This file only says where things are."""

from __future__ import annotations

from pathlib import Path

from quantkit.plugins.hooks import Register, hookimpl

QUANTKIT_API = 1


@hookimpl
def register_methods(register: Register) -> None:
    register("imatrix", "quantkit_imatrix.method:METHOD")


@hookimpl
def recipe_dirs() -> list[Path]:
    return [Path(__file__).parent / "recipes"]
