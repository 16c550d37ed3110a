"""Recovery of scales and norms as a quantkit plugin. This file only says where things are."""

from __future__ import annotations

from pathlib import Path

from quantkit.plugins.hooks import Register, hookimpl


@hookimpl
def register_recoveries(register: Register) -> None:
    register("distill", "quantkit_recover.recovery:RECOVERY")


@hookimpl
def recipe_dirs() -> list[Path]:
    return [Path(__file__).parent / "recipes"]
