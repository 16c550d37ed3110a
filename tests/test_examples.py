"""The scripts and the notebook of examples/ run as they are."""

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def _in_a_folder(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "words"), [
    ("chat", "MB of keys and values"), pytest.param("compare", "KL 0.", marks=pytest.mark.slow)])
def test_a_script(name, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(FOLDER / f"{name}.py"))
    assert words in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook(capsys):
    names = {}
    for cell in json.loads((FOLDER / "first_model.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            *lines, last = cell["source"].splitlines()
            whole = last.startswith((" ", "import"))
            exec(compile("\n".join([*lines, last] if whole else lines), "cell", "exec"), names)
            if not whole:
                shown = eval(last, names)
                assert "<table>" in shown._repr_html_()
    assert capsys.readouterr().out.count(", 5") >= 2


def test_none_is_left_out():
    assert {path.name for path in FOLDER.iterdir()} == {"chat.py", "compare.py", "first_model.ipynb"}
