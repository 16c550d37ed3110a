"""The registry alone: lazy targets, one meaning a name, the right type, the nearest name."""

import sys

import pytest

from quantkit.errors import PluginError, UsageError
from quantkit.registry import Registry, load_target


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
    table.register("a", "qk_lazy_target:THING", owner="dist-a", help="one line")
    assert list(table) == ["a"] and "a" in table and len(table) == 1
    assert table.entry("a").about["help"] == "one line"
    assert not module.exists()
    assert table.get("a") == 42
    assert module.exists()


def test_an_object_is_its_own_target():
    table, thing = Registry("thing"), object()
    table.register("a", thing, owner="dist-a")
    assert table.get("a") is thing


def test_a_collision_names_both_distributions():
    table = Registry("method")
    table.register("rtn", 1, owner="dist-one")
    with pytest.raises(PluginError, match=r"'rtn'.*dist-one.*dist-two") as caught:
        table.register("rtn", 2, owner="dist-two")
    assert "QUANTKIT_PLUGINS" in caught.value.next
    assert table.get("rtn") == 1


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


@pytest.mark.parametrize("target", ["quantkit_no_such_module:X", "quantkit.errors:NoSuchName"])
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


def test_load_target_returns_objects_and_imports_strings():
    assert load_target(3, "x") == 3
    assert load_target("quantkit.errors:DONE", "x") == 0
