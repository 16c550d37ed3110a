"""``quantkit plugins list``."""

from dataclasses import replace

import pytest

from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginInfo, PluginManager, current


def test_list_names_everything_registered(cli):
    result = cli("plugins", "list")
    assert result.exit_code == 0
    for table in current().registries.values():
        for name in table:
            assert name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_has_owner_and_target(cli_json):
    facts = cli_json("plugins", "list")
    methods = {entry["name"]: entry for entry in facts["registered"]["methods"]}
    assert methods["rtn"]["target"] == "quantkit.quantization.methods.rounding:RTN"
    assert methods["rtn"]["owner"] == "quantkit"
    assert set(facts["registered"]) == set(current().registries)


class Observer:
    def __init__(self, folder):
        self.folder = folder

    @hookimpl
    def register_methods(self, register):
        register("mine", "no_such_module:METHOD", note=1)

    @hookimpl
    def recipe_dirs(self):
        return [self.folder]

    @hookimpl
    def eval_dirs(self):
        return [self.folder]

    @hookimpl
    def on_run_finished(self, kind):
        pass


def test_all_that_a_plugin_brings_is_listed(cli, cli_json, tmp_path, monkeypatch):
    for name in ("int3-mine.yaml", "int8.yaml"):
        (tmp_path / name).write_text("rules: []\n")
    manager = PluginManager(only=())
    manager.add(Observer(tmp_path), "dist-mine", name="mine", version="3.1")
    manager.plugins[-1] = replace(manager.plugins[-1], refused=("method 'rtn' is registered twice",))
    monkeypatch.setattr("quantkit.cli.plugin_facts.current", lambda: manager)
    result = cli("plugins", "list")
    assert result.stderr.count("warning: ") == 1 and "'int8' is a name of quantkit's own" in result.stderr
    shown = result.stdout
    assert shown[shown.index("dist-mine"):].splitlines() == [
        "dist-mine 3.1 (plugin 'mine')",
        "  methods            mine",
        "  recipes            int3-mine",
        "  evaluation suites  int3-mine, int8",
        "  observes           on_run_finished",
        "  not used           method 'rtn' is registered twice"]
    facts = cli_json("plugins", "list")
    plugin = facts["plugins"][-1]
    assert (plugin["file"], plugin["api"]) == (__file__, 1)
    assert plugin["observes"] == ["on_run_finished"]
    (recipe,) = [recipe for recipe in facts["recipes"] if recipe["plugin"] == "mine"]
    mine = {"owner": "dist-mine", "distribution": "dist-mine", "plugin": "mine", "version": "3.1"}
    assert recipe == {"kind": "recipe", "name": "int3-mine", **mine,
                      "file": str(tmp_path / "int3-mine.yaml")}
    (method,) = [entry for entry in facts["registered"]["methods"] if entry["plugin"] == "mine"]
    assert method == {"kind": "method", "name": "mine", **mine, "target": "no_such_module:METHOD",
                      "module": "no_such_module", "file": None, "about": {"note": "1"}}


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["doctor"]])
def test_a_broken_plugin_is_shown_with_its_error(cli, monkeypatch, arguments):
    broken = PluginInfo("bad", "dist-bad", "1.0", "ImportError: no left_pad")
    monkeypatch.setattr(current(), "plugins", [*current().plugins, broken])
    shown = cli(*arguments).stdout
    assert "dist-bad" in shown and "ImportError: no left_pad" in shown
