"""The distributions: what is in them, and that the wheel runs from itself alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from quantkit import __version__

pytestmark = pytest.mark.network
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist, built with the hatchling that is installed."""
    pytest.importorskip("hatchling", reason="needs the extra dev")
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    with zipfile.ZipFile(found) as opened:
        yield opened


def test_the_wheel_holds_both_packages_and_the_data(wheel):
    names = set(wheel.namelist())
    recipes = {f"quantkit/_data/recipes/{p.name}" for p in (ROOT / "recipes").glob("*.yaml")}
    evals = ROOT / "evals"
    data = [*evals.glob("*.yaml"), *(evals / "tasks").iterdir(), *(evals / "texts").iterdir(),
            evals / "losses.json"]
    suites = {f"quantkit/_data/{p.relative_to(ROOT)}" for p in data}
    assert recipes and len(suites) > 10 and recipes | suites <= names
    # results, peers and scripts are for those who have the repository
    assert {name for name in names if name.startswith("quantkit/_data/evals/")} == suites
    assert {"quantkit/py.typed", "quantkit_kernels/__init__.py", "quantkit/cli/main.py"} <= names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "quantkit").rglob("*.py")}
    assert sources <= names
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantkit").rglob("*.tmpl")}
    assert len(templates) > 15 and templates <= names
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "quantkit" / "serving" / "page").iterdir()
            if path.is_file()}
    assert len(page) > 15 and page <= names


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"quantkit", "quantkit_kernels", f"quantkit-{__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if name.endswith((".pyc", ".safetensors", ".gguf"))]


def test_the_metadata(wheel):
    info = f"quantkit-{__version__}.dist-info"
    meta = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert meta["Version"] == __version__ and meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    required = [line for line in meta.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("transformers", "lm-eval"))]
    assert "quantkit = quantkit.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.slow
def test_the_wheel_runs_from_itself_alone(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "QUANTKIT_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", "recipes", "list", "--json"],
                          cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site" / "quantkit" / "_data" / "recipes" / "int8.yaml") in done.stdout
    assert str(ROOT) not in done.stdout


def test_the_sdist_can_be_built_and_tested_again(built):
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md",
            "quantkit/cli/main.py", "kernels/quantkit_kernels/__init__.py", "recipes/int8.yaml",
            "tests/conftest.py", "docs/plugins.md", "docs/plugin-reference.md",
            "quantkit/testing/templates/method/method.py.tmpl",
            "plugins/quantkit-hqq/pyproject.toml"} <= names
