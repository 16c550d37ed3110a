"""A plugin's folder: complete or not there at all, with names that mean something everywhere."""

import ast
from pathlib import Path

import pytest

from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import KINDS as REGISTRIES
from quantkit.plugins.manager import PluginManager
from quantkit.support.errors import UsageError
from quantkit.testing.scaffold import render as module
from quantkit.testing.scaffold.kinds import KINDS
from quantkit.testing.scaffold.names import LONGEST, plugin_names, require_free
from quantkit.testing.scaffold.render import TEMPLATES, make_plugin, render

LONG = "a-name-as-long-as-can-be"
EVERY_KIND = pytest.mark.parametrize("kind", list(KINDS))


def test_there_is_a_kind_for_everything_that_can_be_registered():
    assert {kind.registry for kind in KINDS.values()} - {None} == set(REGISTRIES)
    assert {path.name for path in TEMPLATES.iterdir()} == {"common", *KINDS}


def test_templates_are_no_python_files():
    """Tools that look for Python files must not take a template for one."""
    files = [path for path in TEMPLATES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files and {path.suffix for path in files} == {".tmpl"}


@EVERY_KIND
def test_every_file_compiles_and_fits_a_line(kind):
    assert len(LONG) == LONGEST
    for name in (KINDS[kind].example, LONG):
        files = render(plugin_names(name, KINDS[kind]), KINDS[kind])
        assert {"pyproject.toml", "README.md", f"tests/test_{kind}.py"} <= set(files)
        for path, content in files.items():
            assert "$" not in content and content.endswith("\n")
            if path.endswith(".py"):
                assert ast.get_docstring(ast.parse(content))
                assert max(map(len, content.splitlines())) <= 110, path


@EVERY_KIND
def test_an_example_is_short(kind):
    names = plugin_names(KINDS[kind].example, KINDS[kind])
    code = render(names, KINDS[kind]).get(f"src/{names.package}/{kind}.py", "")
    assert len(code.splitlines()) <= 70


def test_one_name_in_all_its_spellings():
    for text in ("my-method", "my_method", "quantkit-my-method"):
        names = plugin_names(text, KINDS["method"])
        assert (names.registered, names.distribution, names.package, names.class_name) == (
            "my-method", "quantkit-my-method", "quantkit_my_method", "MyMethod")
    assert plugin_names("my-metric", KINDS["metric"]).registered == "my_metric"


@pytest.mark.parametrize("name", ["", "Big", "1st", "a b", "a/b", "../a", "a--b", "-a", "a.b", "größer",
                                  "none", "true", "quantkit-", "class", "a" * (LONGEST + 1), "a\n", "a:b",
                                  "a(b)"])
def test_names_that_cannot_be_spelled_are_refused(name, tmp_path):
    with pytest.raises(UsageError) as caught:
        make_plugin(name, "method", tmp_path)
    assert caught.value.next
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name"), [
    ("method", "gptq"), ("policy", "window"), ("policy", "int8"), ("codec", "snapkv"), ("command", "eval"),
    ("architecture", "qwen3-moe"), ("recipe", "int4"), ("suite", "quick"), ("source", "hub")])
def test_names_that_are_taken_are_refused(kind, name, tmp_path):
    with pytest.raises(UsageError, match="exists already, in quantkit"):
        make_plugin(name, kind, tmp_path)


@pytest.mark.parametrize(("kind", "name", "says"), [
    ("method", "null", "a recipe doesn't read it as a text"), ("recipe", "null", "doesn't read it as a text"),
    ("metric", "model", "'model' is one of quantkit's"), ("metric", "kv", "'kv' is one of quantkit's"),
    ("metric", "kl-mean", "'kl_mean' is one of quantkit's"), ("codec", "f16", "kernels know a built-in"),
    ("codec", "token4", "kernels know"), ("codec", "hadamard4", "kernels know"),
    ("method", "hqq", "it is a name of quantkit-hqq"), ("policy", "int6", "it is a name of quantkit-int6kv"),
    ("recipe", "int4-hqq", "it is a name of quantkit-hqq"),
    ("command", "keydiff", "quantkit-keydiff is a plugin of quantkit's own")])
def test_names_that_could_not_be_used_are_refused(kind, name, says, tmp_path):
    with pytest.raises(UsageError, match=f"a {kind} can't be called '{name}'") as caught:
        make_plugin(name, kind, tmp_path)
    assert says in caught.value.why and caught.value.next == f"quantkit plugins new my-{name} --kind {kind}"
    assert not any(tmp_path.iterdir())


def test_the_name_that_is_suggested_instead_can_be_used(tmp_path):
    for kind, name in (("method", "null"), ("metric", "kv"), ("codec", "token4"), ("method", "hqq")):
        assert make_plugin(f"my-{name}", kind, tmp_path).folder.is_dir()


def test_an_installed_distribution_is_refused():
    class Plugin:
        """It registers nothing."""

        @hookimpl
        def on_run_finished(self, kind):
            """Listen."""

    manager = PluginManager(only=[])
    manager.add(Plugin(), "quantkit-mine", name="mine")
    with pytest.raises(UsageError, match="installed already"):
        require_free(plugin_names("mine", KINDS["metric"]), KINDS["metric"], manager)


@pytest.mark.parametrize(("kind", "name"), [("method", "method"), ("codec", "side")])
def test_a_class_is_not_called_like_what_its_file_imports(kind, name, tmp_path):
    clash = {"method": "MethodOptions", "codec": "SideCodec"}[kind]
    with pytest.raises(UsageError) as caught:
        make_plugin(name, kind, tmp_path)
    assert clash in (caught.value.why or "") and not any(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "quantkit-mine").mkdir()
    (tmp_path / "quantkit-mine" / "work.py").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        make_plugin("mine", "metric", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["quantkit-mine", "work.py"]
    link = tmp_path / "quantkit-other"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists already"):
        make_plugin("other", "metric", tmp_path)


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    write = Path.write_text

    def full(path, *arguments, **options):
        if path.name == "README.md":
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    monkeypatch.setattr(module.Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        make_plugin("mine", "metric", tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_unknown_kind_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'method'"):
        make_plugin("mine", "methods", Path())
