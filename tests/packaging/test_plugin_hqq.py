"""The first-party plugin, installed by pip as a stranger's would be: found by its entry point only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.checkpoint.manifest import Manifest
from quantkit.testing import tiny_model

pytestmark = pytest.mark.network
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that pip installed the plugin into."""
    pytest.importorskip("hatchling", reason="needs the extra dev")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                           "--no-deps", "--no-build-isolation", "--target", str(target),
                           str(ROOT / "plugins" / "quantkit-hqq")],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(site):
    """The command, with the installed plugin on the path (``installed``) and ``QUANTKIT_PLUGINS``."""

    def call(*arguments, installed=True, plugins=None):
        env = {k: v for k, v in os.environ.items() if k not in ("QUANTKIT_PLUGINS", "PYTHONPATH")}
        paths = [ROOT, ROOT / "kernels", *([site] if installed else [])]
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        # "hqq" and not all: whatever else is installed beside the tests stays out
        env["QUANTKIT_PLUGINS"] = plugins if plugins is not None else ("hqq" if installed else "")
        return subprocess.run([sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)],
                              env=env, capture_output=True, text=True, timeout=120)

    return call


def test_its_recipe_makes_a_checkpoint(run, tiny, tmp_path):
    out = tmp_path / "OUT"
    done = run("quantize", tiny, "--recipe", "int4-hqq", "--out", out)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.from_bytes((out / "quantkit.json").read_bytes())
    assert {row.method for row in manifest.layers} == {"hqq"}
    assert set(manifest.plugins) == {"quantkit", "quantkit-hqq"}
    # whoever reads it needs no method: the plugin may be gone
    assert run("verify", out, installed=False).returncode == 0


def test_it_is_listed_with_its_distribution(run):
    done = run("plugins", "list", "--json")
    facts = json.loads(done.stdout)
    (found,) = [p for p in facts["plugins"] if p["name"] == "hqq"]
    assert found["file"].endswith("quantkit_hqq/__init__.py")
    facts_of_it = ("name", "distribution", "version", "module", "api", "error", "refused")
    assert {key: found[key] for key in facts_of_it} == {
        "name": "hqq", "distribution": "quantkit-hqq", "version": "0.1.0", "module": "quantkit_hqq",
        "api": 1, "error": None, "refused": []}
    (method,) = [entry for entry in facts["registered"]["methods"] if entry["name"] == "hqq"]
    assert (method["distribution"], method["version"]) == ("quantkit-hqq", "0.1.0")
    assert method["file"].endswith("quantkit_hqq/method.py")
    assert [entry["name"] for entry in facts["recipes"] if entry["plugin"] == "hqq"] == ["int4-hqq"]
    assert "int4-hqq" in run("recipes", "list").stdout


@pytest.mark.slow
def test_without_it_neither_recipe_nor_method_is_known(run, tiny, tmp_path):
    done = run("quantize", tiny, "--recipe", "int4-hqq", "--dry-run", installed=False)
    assert done.returncode == 2 and "no recipe is called 'int4-hqq'" in done.stderr
    assert "it belongs to the plugin quantkit-hqq, which isn't installed" in done.stderr
    assert "pip install plugins/quantkit-hqq" in done.stderr
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rules:\n  - match: '*'\n    method: hqq\n"
                      "    spec: {bits: 4, granularity: {strategy: group, size: 64}}\n", encoding="utf-8")
    done = run("quantize", tiny, "--recipe", recipe, "--dry-run", installed=False)
    assert done.returncode == 2 and "no method is called 'hqq'" in done.stderr
    assert run("quantize", tiny, "--recipe", recipe, "--dry-run").returncode == 0


def test_an_empty_variable_leaves_it_out_though_installed(run):
    assert "int4-hqq" not in run("recipes", "list", plugins="").stdout


def test_listing_imports_none_of_its_code(site):
    code = ("import sys\nfrom quantkit.cli.main import main\n"
            "try:\n    main(['plugins', 'list'])\nexcept SystemExit:\n    pass\n"
            "print([m for m in sys.modules if m in ('torch', 'quantkit_hqq.method')])")
    env = {**os.environ, "QUANTKIT_PLUGINS": "hqq",
           "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", site)))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "hqq" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
