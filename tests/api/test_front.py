"""``import quantkit``: what it gives, and that it costs nothing; the examples in its docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import quantkit

NAMES = ["Checkpoint", "Engine", "KVSpec", "Model", "QuantkitError", "Recipe", "compare", "evaluate", "load",
         "plan", "quantize", "serve"]
MODULES = ["evaluate", "model", "plan", "quantize", "serve"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_an_import_loads_nothing_of_weight():
    loaded = run("import sys; before = set(sys.modules); import quantkit; "
                 "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))").split()
    assert not set(loaded) - {"quantkit"} - set(sys.stdlib_module_names), loaded


def test_the_names_are_there_and_said():
    assert quantkit.__all__ == NAMES and set(NAMES) <= set(dir(quantkit))
    for name in NAMES:
        assert getattr(quantkit, name).__doc__
    with pytest.raises(AttributeError, match="nothing"):
        _ = quantkit.nothing


def test_it_is_a_module_that_runs():
    assert quantkit.__version__ in subprocess.run([sys.executable, "-m", "quantkit", "--version"], text=True,
                                                  capture_output=True).stdout


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, smollm2, tmp_path, monkeypatch):
    """They are run as they stand, one after another, behind those that make what they name."""
    module = importlib.import_module(f"quantkit.api.{name}")
    monkeypatch.chdir(tmp_path)
    names = {"quantkit": quantkit}
    if name == "evaluate":
        quantkit.quantize("smollm2", "int8", "smollm2-int8", progress=False)
    if name == "model":
        names["model"] = quantkit.load("smollm2", progress=False)
    tests = sorted((test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples),
                   key=lambda test: test.lineno or 0)
    for test in tests:
        test.globs.update(names)
        failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
            test, clear_globs=False)
        assert tried and not failed
        names = test.globs
    functions = [value for value in vars(module).values() if inspect.isfunction(value)
                 and value.__module__ == module.__name__ and value.__name__ in NAMES]
    assert functions and all(">>>" in function.__doc__ for function in functions)
