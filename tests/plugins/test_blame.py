"""Whose code raised an error, and what is said of it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from quantkit.plugins.blame import blame, plugin_failure
from quantkit.plugins.manager import PluginManager, module_file
from quantkit.serving.errors import api_error
from quantkit.support.errors import PluginError, QuantkitError

PLUGIN = """
from quantkit.plugins.hooks import hookimpl

@hookimpl
def register_methods(register):
    register("far", "qk_blamed_far.method:METHOD")
    register("borrowed", "torch.nn.functional:linear")
    register("whole", "torch:matmul")
    register("standard", "json:loads")

def fail():
    raise ValueError("odd")

def call(function):
    return function()
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed plugin: a package, and another one in which a target of it is."""
    for folder, code in (("qk_blamed", PLUGIN), ("qk_blamed/inner", "def fail():\n    return [][1]\n"),
                         ("qk_blamed_far", ""),
                         ("qk_blamed_far/method", "METHOD = 1\ndef fail():\n    raise OSError('x')\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = PluginManager(only=())
    module = importlib.import_module("qk_blamed")
    manager.add(module, "dist-blamed", name="blamed", version="2.0")
    monkeypatch.setattr("quantkit.plugins.blame.current", lambda: manager)
    yield module
    for name in [name for name in sys.modules if name.startswith("qk_blamed")]:
        del sys.modules[name]


def error_of(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_an_error_in_a_plugin_says_whose_and_where(plugin):
    error = error_of(plugin.fail)
    info, _ = blame(error)
    assert (info.name, info.distribution, info.version) == ("blamed", "dist-blamed", "2.0")
    failure = plugin_failure(error)
    assert isinstance(failure, PluginError)
    assert failure.what == "plugin 'blamed' of dist-blamed 2.0 failed: ValueError: odd"
    assert failure.why == f"{plugin.__file__}:12 in fail"
    assert failure.next == "quantkit plugins check blamed, or leave it out: QUANTKIT_PLUGINS= quantkit …"


def test_a_submodule_and_a_targets_module_are_the_plugins_too(plugin):
    for name in ("qk_blamed.inner", "qk_blamed_far.method"):
        assert blame(error_of(importlib.import_module(name).fail))[0].name == "blamed"


def test_a_library_called_by_a_plugin_is_the_plugins_matter(plugin):
    error = error_of(plugin.call, lambda: importlib.import_module("json").loads("{"))
    assert blame(error)[0].name == "blamed"
    assert "in call" in plugin_failure(error).why


def test_causes_contexts_and_groups_are_looked_at(plugin):
    def caused():
        try:
            plugin.fail()
        except ValueError as error:
            raise KeyError("outer") from error

    def handled():
        try:
            plugin.fail()
        finally:
            raise_outer()

    def raise_outer():
        raise KeyError("outer")

    def grouped():
        raise ExceptionGroup("several", [KeyError("a"), error_of(plugin.fail)])

    for function in (caused, handled, grouped):
        assert blame(error_of(function))[0].name == "blamed"


def test_an_error_that_causes_itself_ends(plugin):
    error = KeyError("a")
    error.__cause__ = ValueError("b")
    error.__cause__.__context__ = error
    assert blame(error) is None


def test_our_own_errors_are_not_a_plugins(plugin):
    assert plugin_failure(error_of(int, "x")) is None
    assert plugin_failure(error_of(lambda: {}["x"])) is None
    # whoever raises one of ours has said what there is to say
    assert plugin_failure(error_of(plugin.call, lambda: (_ for _ in ()).throw(QuantkitError("said")))) is None


def test_without_plugins_nobody_is_blamed():
    assert blame(error_of(int, "x")) is None


def test_a_client_is_told_who_failed_but_not_what_it_said(plugin):
    answer = api_error(error_of(plugin.fail))
    assert (answer.status_code, answer.code) == (500, "plugin_error")
    assert answer.detail == "the plugin 'blamed' of dist-blamed 2.0 failed: ValueError"
    assert api_error(error_of(int, "x")).code == "internal_error"


def test_a_server_says_it_on_its_terminal(plugin, capsys):
    from quantkit.cli.serve.command import _failed

    _failed(error_of(plugin.fail))
    said = capsys.readouterr().err
    assert "error: plugin 'blamed' of dist-blamed 2.0 failed: ValueError: odd" in said
    assert "internal error" not in said
    _failed(error_of(int, "x"))
    assert "internal error: ValueError" in capsys.readouterr().err


def test_a_worker_of_a_cluster_names_the_plugin_before_its_traceback_is_lost(plugin, monkeypatch):
    from quantkit.executor import ray
    from quantkit.executor.cluster import WorkerSetup

    monkeypatch.setattr(ray, "_register_tensors", lambda: None)
    setup = WorkerSetup(torch.get_num_threads(), {}, [])
    with pytest.raises(PluginError, match=r"of dist-blamed .* failed: ValueError: odd"):
        ray._call(setup, plugin.fail)
    with pytest.raises(ValueError, match="invalid literal"):
        ray._call(setup, int, "x")


def test_a_modules_file_is_known_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "qk_never" / "deep").mkdir(parents=True)
    for name in ("qk_never/__init__.py", "qk_never/deep/__init__.py", "qk_never/deep/leaf.py"):
        (tmp_path / name).write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module_file("qk_never.deep.leaf") == str(tmp_path / "qk_never" / "deep" / "leaf.py")
    assert module_file("qk_never.deep.none") is None and module_file("qk_nowhere.a") is None
    assert not [name for name in sys.modules if name.startswith("qk_never")]


def test_a_library_from_which_a_plugin_registers_something_is_not_the_plugins(plugin):
    x = torch.zeros(2, 3)
    for function, *arguments in ((torch.nn.functional.linear, x, x.T), (torch.nn.functional.glu, x),
                                 (torch.cdist, x, None), (importlib.import_module("json").loads, "{")):
        error = error_of(function, *arguments)
        assert blame(error) is None and plugin_failure(error) is None
        assert blame(error_of(plugin.call, lambda f=function, a=arguments: f(*a)))[0].name == "blamed"
