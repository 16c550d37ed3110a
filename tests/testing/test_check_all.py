"""Checking all that a plugin registers: each thing by itself, and with what its registration says."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from quantkit.kv.policies.snapkv import SnapKV
from quantkit.kv.policies.window import WindowPolicy
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginInfo, PluginManager
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_config
from quantkit.testing.plugin import check_all

RECIPE = """
name: {name}
rules:
  - {{match: "*", method: {method}, spec: {{bits: 8, granularity: {{strategy: channel}}}}}}
"""


def manager_with(plugin):
    manager = PluginManager(only=[])
    manager.add(plugin, "dist", name="mine")
    return manager


def statuses(manager):
    return {(result.kind, result.name): result.status for result in check_all(manager, "mine")}


def test_what_the_kit_has_no_check_for_is_loaded():
    class Plugin:
        @hookimpl
        def register_sources(self, register):
            register("good", "quantkit.sources.local:KIND")
            register("wrong", "quantkit.sources.local:LocalSource")

    assert statuses(manager_with(Plugin())) == {
        ("source", "good"): "not checked", ("source", "wrong"): "failed"}


def test_an_architecture_is_checked_with_its_config(monkeypatch):
    class Plugin:
        @hookimpl
        def register_architectures(self, register):
            register("told", "quantkit.models.families:LLAMA", check_config=tiny_config("llama"))
            register("mute", "quantkit.models.families:LLAMA")

    monkeypatch.setattr("quantkit.testing.check_architecture",
                        lambda architecture, config: architecture.parse(config))
    assert statuses(manager_with(Plugin())) == {
        ("architecture", "told"): "ok", ("architecture", "mute"): "not checked"}


class Share(SnapKV):
    name: ClassVar[str] = "share"


class Count(WindowPolicy):
    name: ClassVar[str] = "count"


def test_a_policy_is_checked_with_the_options_that_are_told(monkeypatch):
    class Plugin:
        @hookimpl
        def register_kv_policies(self, register):
            register("share", Share, check_options={"window": 8})
            register("count", Count)  # it needs a budget

    given = {}
    monkeypatch.setattr("quantkit.testing.check_policy",
                        lambda policy, **options: given.update({policy.name: options}))
    assert set(statuses(manager_with(Plugin())).values()) == {"ok"}
    assert given == {"share": {"window": 8}, "count": {}}


def test_a_policy_whose_class_has_another_name_fails():
    class Plugin:
        @hookimpl
        def register_kv_policies(self, register):
            register("other", Share)

    (result,) = check_all(manager_with(Plugin()), "mine")
    assert result.status == "failed" and "calls itself 'share'" in result.why


def test_recipes_are_checked(tmp_path):
    for file, name, method in (("good", "good", "rtn"), ("unknown", "unknown", "x"),
                               ("misnamed", "other", "rtn")):
        (tmp_path / f"{file}.yaml").write_text(RECIPE.format(name=name, method=method))

    class Plugin:
        @hookimpl
        def recipe_dirs(self):
            return [tmp_path]

    assert statuses(manager_with(Plugin())) == {
        ("recipe", "good"): "ok", ("recipe", "unknown"): "failed", ("recipe", "misnamed"): "failed"}


def test_a_plugin_that_was_left_out_fails():
    manager = PluginManager(only=[])
    manager.plugins.append(PluginInfo("mine", "dist", "1", "ImportError: no left_pad"))
    (result,) = check_all(manager, "mine")
    assert result.status == "failed" and "no left_pad" in (result.why or "")
    with pytest.raises(UsageError):
        list(check_all(manager, "yours"))


@pytest.mark.parametrize("refused", [ZeroDivisionError("division by zero"), SystemExit(3)])
def test_code_that_raises_costs_its_own_line_only(monkeypatch, refused):
    def check(method):
        if method.name == "first":
            raise refused

    monkeypatch.setattr("quantkit.testing.check_method", check)
    first, second = check_all(manager_with(registering("first", "second")), "mine")
    assert (first.status, second.status) == ("failed", "ok") and type(refused).__name__ in (first.why or "")


def installed_as(monkeypatch, **plugins):
    """A manager that finds these plugins by their entry points."""
    points = [SimpleNamespace(name=name, value=name, load=lambda plugin=plugin: plugin,
                              dist=SimpleNamespace(name=f"dist-{name}", version="1"))
              for name, plugin in plugins.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    with pytest.warns(UserWarning, match="not all can be used"):
        return PluginManager()


def registering(*names):
    class Plugin:
        @hookimpl
        def register_methods(self, register):
            for name in names:
                register(name, replace(METHOD, name=name))

    return Plugin()


def test_a_plugin_that_has_only_a_builtins_name_fails(monkeypatch):
    (result,) = check_all(installed_as(monkeypatch, mine=registering("rtn")), "mine")
    assert (result.status, result.next) == ("failed", "register it under another name")
    assert "'rtn' is registered twice, by quantkit and by dist-mine" in (result.why or "")


def test_a_contested_name_fails_for_all_who_have_it(monkeypatch):
    monkeypatch.setattr("quantkit.testing.check_method", lambda method: None)
    manager = installed_as(monkeypatch, mine=registering("same", "good"), yours=registering("same"))
    failed, good = check_all(manager, "mine")
    assert failed.status == "failed" and "by dist-mine and by dist-yours" in (failed.why or "")
    assert failed.next and "QUANTKIT_PLUGINS" in failed.next and (good.name, good.status) == ("good", "ok")
    (failed,) = check_all(manager, "yours")
    assert failed.status == "failed" and "by dist-mine and by dist-yours" in (failed.why or "")
