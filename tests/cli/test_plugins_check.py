"""``quantkit plugins check``."""

import json
from dataclasses import replace

import pytest

from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginManager
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.support.errors import PluginError
from quantkit.testing import check_method


class Plugin:
    """A good method, one that can't be imported, and a source that names no model."""

    @hookimpl
    def register_methods(self, register):
        register("good", replace(METHOD, name="good"))
        register("gone", "quantkit.no_such_module:METHOD")

    @hookimpl
    def register_sources(self, register):
        register("mute", "quantkit.sources.local:KIND")


@pytest.fixture
def manager(monkeypatch):
    manager = PluginManager(only=[])
    manager.add(Plugin(), "dist-mine", name="mine")
    monkeypatch.setattr("quantkit.plugins.manager.current", lambda: manager)
    # what the kit says of a method is tested with the kit
    monkeypatch.setattr("quantkit.testing.check_method", lambda method: None)
    return manager


@pytest.mark.parametrize("name", ["mine", "dist-mine"])
def test_a_line_for_each_thing_and_counts(cli, manager, name):
    result = cli("plugins", "check", name)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any(line.split() == ["method", "good", "ok"] for line in lines)
    assert "failed" in result.stdout and "quantkit.no_such_module" in result.stdout
    assert lines[-1].startswith("1 ok, 1 failed, ") and max(map(len, lines)) <= 80


def test_json(cli, manager):
    result = cli("plugins", "check", "mine", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert (facts["ok"], facts["failed"], facts["not_checked"]) == (1, 1, 1)
    assert [row["status"] for row in facts["results"] if row["name"] == "good"] == ["ok"]
    assert "good" in result.stderr, "progress is told on stderr"


def test_what_the_kit_finds_is_said(cli, manager, monkeypatch):
    def broken(method):
        raise PluginError("it wrote to an argument", why="a method is pure", next="copy it first")

    monkeypatch.setattr("quantkit.testing.check_method", broken)
    text = " ".join(cli("plugins", "check", "mine").stdout.split())
    assert "failed: it wrote to an argument; a method is pure (next: copy it first)" in text


def test_an_unknown_plugin_gets_the_nearest(cli, manager):
    result = cli("plugins", "check", "minne")
    assert result.exit_code == 2 and "did you mean 'mine'" in result.stderr


def test_the_real_check_is_called(cli, manager, monkeypatch):
    calls = []
    monkeypatch.setattr("quantkit.testing.check_method", lambda method: calls.append(method.name))
    cli("plugins", "check", "mine")
    assert calls == ["good"] and callable(check_method)
