"""A plugin's folder: complete or not there at all, with an example that passes its own tests."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.plugins.manager import PluginManager
from quantkit.support.errors import UsageError
from quantkit.testing import scaffold
from quantkit.testing.plugin import check_all
from quantkit.testing.scaffold import KINDS, LONGEST, make_plugin, render

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_made_passes_its_own_tests_and_the_check(kind, tmp_path, monkeypatch):
    plugin = make_plugin(kind, KINDS[kind].example, tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=plugin.folder,
                          env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(plugin.folder / "src")
    try:
        module = importlib.import_module(plugin.package)
        assert [name for name in sys.modules if name.startswith(plugin.package)] == [plugin.package]
        manager = PluginManager(only=[])
        manager.add(module, plugin.distribution, name=plugin.name)
        monkeypatch.setattr("quantkit.quantization.recipe.current", lambda: manager)
        monkeypatch.setattr("quantkit.testing.plugin._check_entry", lambda manager, registry, entry:
                            manager.registries[registry].get(entry.name))  # its own tests have checked it
        results = list(check_all(manager, plugin.name))
        assert {result.status for result in results} == {"ok"}, results
        assert {result.name for result in results} == {plugin.key, plugin.recipe} - {""}
    finally:
        for name in [name for name in sys.modules if name.startswith(plugin.package)]:
            del sys.modules[name]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_file_compiles_and_fits_a_line_whatever_its_name(kind):
    for name in (KINDS[kind].example, "a-name-as-long-as-can-be"):
        assert len(name) <= LONGEST
        files = render(kind, name).files
        assert {"pyproject.toml", "README.md", f"tests/test_{kind}.py"} <= set(files)
        for path, content in files.items():
            assert "$" not in content and content.endswith("\n")
            if path.endswith(".py"):
                assert ast.get_docstring(ast.parse(content))
                assert max(map(len, content.splitlines())) <= 110, path


def test_one_name_in_all_its_spellings():
    for text in ("my-method", "my_method", "quantkit-my-method"):
        plugin = render("method", text)
        assert (plugin.key, plugin.distribution, plugin.package) == (
            "my-method", "quantkit-my-method", "quantkit_my_method")
    assert render("metric", "my-metric").key == "my_metric"


@pytest.mark.parametrize("name", ["", "Big", "1st", "a b", "../a", "a--b", "a.b", "größer", "class", "null",
                                  "a" * (LONGEST + 1), "gptq"])
def test_names_that_could_not_be_used_are_refused(name, tmp_path):
    with pytest.raises(UsageError) as caught:
        make_plugin("method", name, tmp_path)
    assert caught.value.next and not any(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name"), [
    ("method", "gptq"), ("policy", "int8"), ("codec", "snapkv"), ("architecture", "qwen3-moe")])
def test_names_that_are_taken_are_refused(kind, name, tmp_path):
    with pytest.raises(UsageError, match="exists already, in quantkit"):
        make_plugin(kind, name, tmp_path)


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "quantkit-mine").mkdir()
    (tmp_path / "quantkit-mine" / "work.py").write_text("precious")
    (tmp_path / "quantkit-other").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "other"):
        with pytest.raises(UsageError, match="exists already"):
            make_plugin("metric", name, tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"quantkit-mine", "work.py", "quantkit-other"}


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    write = Path.write_text

    def full(path, *arguments, **options):
        if path.name == "README.md":
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    monkeypatch.setattr(scaffold.Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        make_plugin("metric", "mine", tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_unknown_kind_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'method'"):
        make_plugin("methods", "mine", Path())
