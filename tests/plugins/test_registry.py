"""The registry alone: lazy targets, one meaning a name, the right type, the nearest name."""

import importlib.metadata
import sys
import warnings
from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest

from quantkit.kv.spec import parse_kv
from quantkit.plugins.registry import FIRST_PARTY, Registry, load_target
from quantkit.support.errors import PluginError, UsageError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that says on disk that it was imported."""
    marker = tmp_path / "imported"
    (tmp_path / "qk_lazy_target.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nTHING = 42\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield marker
    sys.modules.pop("qk_lazy_target", None)


def test_a_lazy_target_is_imported_on_first_get_only(module):
    table = Registry("thing")
    table.register("a", "qk_lazy_target:THING", owner="dist-a", about={"help": "one line"})
    assert list(table) == ["a"] and "a" in table
    assert table.entry("a").about["help"] == "one line"
    assert not module.exists()
    assert table.get("a") == 42
    assert module.exists()


def test_an_object_is_its_own_target():
    table, thing = Registry("thing"), object()
    table.register("a", thing, owner="dist-a")
    assert table.get("a") is thing


def test_an_unknown_name_gets_the_nearest():
    table = Registry("method")
    table.register("gptq", 1, owner="d")
    table.register("rtn", 1, owner="d")
    with pytest.raises(UsageError, match="did you mean 'gptq'"):
        table.get("gtpq")


@pytest.mark.parametrize("target", ["no_colon", "two:colons:here"])
def test_a_malformed_target_is_refused_at_once(target):
    with pytest.raises(PluginError, match="module:attr"):
        Registry("thing").register("a", target, owner="d")


@pytest.mark.parametrize("target", ["quantkit_no_such_module:X", "quantkit.support.errors:NoSuchName"])
def test_a_dead_target_fails_when_it_is_used_and_names_its_owner(target):
    table = Registry("thing")
    table.register("a", target, owner="dist-a")
    with pytest.raises(PluginError, match="'a' of dist-a"):
        table.get("a")


def test_a_thing_of_the_wrong_type_is_refused():
    table = Registry("number", expects="builtins:int")
    table.register("a", 1.5, owner="dist-a")
    with pytest.raises(PluginError, match=r"dist-a is a float(.|\n)*builtins.int"):
        table.get("a")


def test_drop_owner_forgets_only_that_owner():
    table = Registry("thing")
    table.register("a", 1, owner="one")
    table.register("b", 2, owner="two")
    table.drop_owner("one")
    assert list(table) == ["b"]


@pytest.mark.parametrize("name", ["", "a b", "a+b", "-a", ".a", "a/b", "ü", "a" * 65, "a\n", "null", "True",
                                  "12", "1e5", "1.5", "0x1F", "1e-5"])
def test_a_name_that_nobody_can_spell_is_refused(name):
    with pytest.raises(PluginError, match="dist-a can't have this name"):
        Registry("thing").register(name, 1, owner="dist-a")


@pytest.mark.parametrize("name", ["a", "h2o", "gpt-2.5_x", "1bit", "int4", "A" * 64, "nullable"])
def test_other_names_are_taken(name):
    table = Registry("thing")
    table.register(name, 1, owner="d")
    assert table.get(name) == 1


def test_a_contested_name_is_left_out_and_asking_names_all():
    table = Registry("method")
    for owner in ("dist-a", "dist-b", "dist-c"):
        table.register("same", 1, owner=owner)
    table.register("other", 2, owner="dist-a")
    assert list(table) == ["other"] and "same" in table
    assert dict(table.usable()) == {"other": 2}
    for ask in (table.get, table.entry):
        with pytest.raises(PluginError, match="3 times, by dist-a, by dist-b and by dist-c") as caught:
            ask("same")
    assert "QUANTKIT_PLUGINS" in caught.value.next
    table.drop_owner("dist-b")
    table.drop_owner("dist-a")
    assert table.get("same") == 1 and table.entry("same").owner == "dist-c"


def test_tables_beside_each_other_share_their_names():
    policies = Registry("policy")
    codecs = Registry("codec", beside=policies)
    policies.register("same", 1, owner="dist-a")
    codecs.register("same", 2, owner="dist-b")
    codecs.register("theirs", 3, owner="dist-b")
    assert list(policies) == [] and list(codecs) == ["theirs"]
    with pytest.raises(PluginError, match=r"'same' .* as policy by dist-a and as codec by dist-b"):
        policies.get("same")
    with pytest.raises(UsageError, match="no policy is called 'theirs'"):
        policies.get("theirs")
    codecs.drop_owner("dist-b")
    assert list(policies) == ["same"] and list(codecs) == []


def test_usable_warns_once_and_passes_over():
    table = Registry("number", expects="builtins:int")
    table.register("good", 1, owner="dist-a")
    table.register("bad", "x:y", owner="dist-b")
    table.register("odd", 1.5, owner="dist-c")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [dict(table.usable()), dict(table.usable())] == [{"good": 1}] * 2
    assert len(caught) == 2 and "dist-b" in str(caught[0].message) and "dist-c" in str(caught[1].message)
    assert set(table.broken) == {"bad", "odd"}
    with pytest.warns(UserWarning, match="dist-a is too small"):
        table.reject("good", "is too small")
    assert not dict(table.usable()) and "dist-a is too small" in table.broken["good"]


def test_a_broken_builtin_is_no_mere_warning():
    table = Registry("number", expects="builtins:int")
    table.register("bad", 1.5, owner="quantkit")
    with pytest.raises(PluginError):
        list(table.usable())


class Base(ABC):
    @abstractmethod
    def keys(self):
        """As a codec's."""


class Half(Base):
    pass


class Full(Base):
    def keys(self):
        return 1


def test_classes_are_asked_for_where_classes_are_expected(monkeypatch):
    monkeypatch.setitem(sys.modules, "qk_bases", SimpleNamespace(Base=Base))
    table = Registry("codec", expects="qk_bases:Base", subclass=True)
    for name, target, problem in (("object", Full(), "is a Full"), ("other", int, "the class int"),
                                  ("half", Half, "the class Half, which lacks keys")):
        table.register(name, target, owner="dist-a")
        with pytest.raises(PluginError, match=problem) as caught:
            table.get(name)
        assert "a subclass of qk_bases.Base" in caught.value.why
    table.register("full", Full, owner="dist-a")
    assert table.get("full") is Full
    instances = Registry("thing", expects="qk_bases:Base")
    instances.register("class", Full, owner="dist-a")
    with pytest.raises(PluginError, match="is the class Full"):
        instances.get("class")


@pytest.mark.parametrize(("code", "says"), [
    ("raise ValueError('odd')", "ValueError: odd"), ("import sys; sys.exit(2)", "SystemExit: 2"),
    ("from quantkit.support.errors import QuantkitError\nraise QuantkitError('no GPU', next='buy it')",
     "no GPU; buy it")])
def test_whatever_an_import_raises_names_its_plugin(tmp_path, monkeypatch, code, says):
    (tmp_path / "qk_raises.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = Registry("thing")
    table.register("a", "qk_raises:X", owner="dist-a", plugin="a", version="1")
    with pytest.raises(PluginError, match="thing 'a' of dist-a 1 \\(plugin 'a'\\)") as caught:
        table.get("a")
    assert caught.value.why == says and caught.value.next == "quantkit plugins check a"


@pytest.fixture
def absent(monkeypatch):
    """No plugin is installed, whatever is installed beside the tests."""
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(("kind", "name", "distribution"), [
    (kind, name, owner) for kind, names in FIRST_PARTY.items() for name, owner in names.items()])
def test_a_name_of_a_plugin_of_the_repository_says_what_to_install(absent, kind, name, distribution):
    with pytest.raises(UsageError) as caught:
        Registry(kind).get(name)
    assert caught.value.why == f"it belongs to the plugin {distribution}, which isn't installed"
    assert caught.value.next == f"pip install plugins/{distribution}"


def test_an_installed_plugin_that_is_left_out_is_not_installed_anew(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    with pytest.raises(UsageError, match="installed but not loaded") as caught:
        Registry("method").get("hqq")
    assert "add hqq to QUANTKIT_PLUGINS" in caught.value.next


@pytest.mark.parametrize("text", ["keydiff", "int6", "window(64)+int6"])
def test_a_kv_setting_says_what_to_install(absent, text):
    with pytest.raises(UsageError, match="pip install plugins/quantkit-"):
        parse_kv(text)


def test_load_target_returns_objects_and_imports_strings():
    assert load_target(3, "x") == 3
    assert load_target("quantkit.support.errors:DONE", "x") == 0


def test_a_thing_has_the_name_under_which_it_is_registered():
    table = Registry("thing", named=True)
    for thing, says in ((SimpleNamespace(name="theirs"), "name 'theirs'"), (SimpleNamespace(), "name None")):
        table.register("mine", thing, owner="dist-a")
        with pytest.raises(PluginError, match=f"thing 'mine' of dist-a .*{says}"):
            table.get("mine")
        table.drop_owner("dist-a")
    right = SimpleNamespace(name="right")
    table.register("right", right, owner="dist-a")
    assert table.get("right") is right
