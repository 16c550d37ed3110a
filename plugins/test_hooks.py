"""What each plugin of the repository does when it is found: little, and as its README says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quantkit.plugins import manager as plugins
from quantkit.plugins.registry import FIRST_PARTY
from quantkit.quantization.recipe import load_recipe

FOLDERS = sorted(Path(__file__).parent.glob("quantkit-*"))
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def package_of(folder: Path) -> str:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (package,) = project["entry-points"]["quantkit"].values()
    return str(package)


def test_its_hooks_import_nothing_heavy(folder: Path) -> None:
    package = package_of(folder)
    code = (f"import sys, {package}; sys.exit('torch' in sys.modules or "
            f"any(name.startswith('{package}.') for name in sys.modules))")
    path = os.pathsep.join(map(str, (folder / "src", ROOT)))
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})


def test_it_registers_what_is_said_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, and recipes whose methods take what they are asked for."""
    manager = plugins.PluginManager(only=[])
    manager.add(importlib.import_module(package_of(folder)), folder.name, name="mine", version="0")
    monkeypatch.setattr("quantkit.quantization.recipe.current", lambda: manager)
    kinds = {table.kind: table for table in manager.registries.values()}
    for kind, names in FIRST_PARTY.items():
        for name in (name for name, owner in names.items() if owner == folder.name):
            if kind != "recipe":
                assert kinds[kind].entry(name).owner == folder.name and kinds[kind].get(name).name == name
                continue
            rules = [rule for rule in load_recipe(name).rules if rule.method]
            assert rules
            for rule in rules:
                method = manager.registries["methods"].get(rule.method)
                assert rule.spec is not None and method.reason_against(rule.spec) is None
                method.options.model_validate(rule.options)
