"""The examples do what they say: as plugins in a manager, and by the tests that they come with."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.plugins.manager import PluginManager
from quantkit.testing.plugin import check_all
from quantkit.testing.scaffold.kinds import KINDS
from quantkit.testing.scaffold.render import make_plugin

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=list(KINDS))
def plugin(request, tmp_path):
    """A plugin of each kind under the name of its example, as ``plugins new`` makes it."""
    return make_plugin(KINDS[request.param].example, request.param, tmp_path)


@pytest.mark.sampled(13)
def test_its_tests_pass(plugin):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))),
           "QUANTKIT_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=plugin.folder,
                          env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sampled(3)
def test_it_can_be_added_and_checked(plugin, monkeypatch):
    """Added as its entry point would be; importing its package imports nothing heavy."""
    monkeypatch.syspath_prepend(plugin.folder / "src")
    module = importlib.import_module(plugin.names.package)
    package = plugin.names.package
    try:
        assert [name for name in sys.modules if name.startswith(package)] == [package]
        manager = PluginManager(only=[])
        manager.add(module, plugin.names.distribution, name=plugin.names.name)
        monkeypatch.setattr("quantkit.plugins.manager.current", lambda: manager)
        monkeypatch.setattr("quantkit.quantization.recipe.current", lambda: manager)
        assert module.QUANTKIT_API == 1
        if (registry := plugin.kind.registry) is not None:
            entry = manager.registries[registry].entry(plugin.names.registered)
            assert entry.owner == plugin.names.distribution
        results = list(check_all(manager, plugin.names.name))
        assert results and {result.status for result in results} == {"ok"}, results
        assert plugin.names.registered in {result.name for result in results}
    finally:
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]


def test_ruff_finds_nothing(plugin):
    pytest.importorskip("ruff", reason="needs the extra dev")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=plugin.folder,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
