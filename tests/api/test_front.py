"""``import quantkit``: what it gives, and that it costs nothing; the examples in its docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit.testing import tiny_model

NAMES = ["Checkpoint", "Engine", "KVSpec", "Model", "QuantkitError", "Recipe", "compare", "evaluate", "load",
         "plan", "quantize", "serve"]
MODULES = ["evaluate", "model", "plan", "quantize", "serve"]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
FIRST, OF_TRANSFORMERS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("name", [
    pytest.param("evaluate", marks=pytest.mark.slow), *MODULES[1:]])
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


def test_the_pages_names_are_all_and_its_example_runs(smollm2, tmp_path, monkeypatch, capsys):
    table = PAGE.partition("| name |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:]))) == (
        set(NAMES) - {"Checkpoint", "Model"})
    monkeypatch.chdir(tmp_path)
    quick = FIRST.replace('"int4"', '"int8"').replace("windows=8", "windows=1, speed=False")
    exec(compile(quick, "page", "exec"), {})
    said = capsys.readouterr().out
    assert "self_attn.q_proj rtn int8" in said and "KL" in said


def test_the_pages_example_with_transformers_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    folder = tiny_model(tmp_path / "tiny", hidden_size=128, head_dim=32, max_position_embeddings=2048)
    code = OF_TRANSFORMERS.replace("MODEL", str(folder)).replace("max_new_tokens=100", "max_new_tokens=8")
    exec(compile(code, "page", "exec"), {})
    assert int(capsys.readouterr().out) > 0
