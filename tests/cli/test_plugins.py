"""``quantkit plugins list``, ``new`` and ``check``."""

import json
from dataclasses import replace

import pytest

from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import PluginInfo, PluginManager, current
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.support.errors import PluginError


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
        register("rtn", "no_such_module:METHOD")

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
    with pytest.warns(UserWarning, match="'rtn' is registered twice"):
        manager.add(Observer(tmp_path), "dist-mine", name="mine", version="3.1")
    monkeypatch.setattr("quantkit.cli.plugins.current", lambda: manager)
    result = cli("plugins", "list")
    assert result.stderr.count("warning: ") == 1 and "'int8' is a name of quantkit's own" in result.stderr
    shown = result.stdout
    assert shown[shown.index("dist-mine"):].splitlines() == [
        "dist-mine 3.1 (plugin 'mine')",
        "  methods            mine",
        "  recipes            int3-mine",
        "  evaluation suites  int3-mine, int8",
        "  observes           on_run_finished",
        "  not used           method 'rtn' is registered twice, by quantkit and by",
        "                     dist-mine"]
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


class Plugin:
    """A good method, one that can't be imported, and a source, for which there is no check."""

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
    monkeypatch.setattr("quantkit.cli.plugins.current", lambda: manager)
    # what the kit says of a method is tested with the kit
    monkeypatch.setattr("quantkit.testing.check_method", lambda method: None)
    return manager


@pytest.mark.parametrize("name", ["mine", "dist-mine"])
def test_check_has_a_line_for_each_thing_and_counts(cli, manager, name):
    result = cli("plugins", "check", name)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any(line.split() == ["method", "good", "ok"] for line in lines)
    assert "failed" in result.stdout and "quantkit.no_such_module" in result.stdout
    assert lines[-1].startswith("1 ok, 1 failed, 1 not checked") and max(map(len, lines)) <= 80


def test_check_gives_json(cli, manager):
    result = cli("plugins", "check", "mine", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert (facts["ok"], facts["failed"], facts["not_checked"]) == (1, 1, 1)
    assert [row["status"] for row in facts["results"] if row["name"] == "good"] == ["ok"]
    assert "good" in result.stderr, "progress is told on stderr"


def test_check_says_what_the_kit_finds(cli, manager, monkeypatch):
    def broken(method):
        raise PluginError("it wrote to an argument", why="a method is pure", next="copy it first")

    monkeypatch.setattr("quantkit.testing.check_method", broken)
    text = " ".join(cli("plugins", "check", "mine").stdout.split())
    assert "failed: it wrote to an argument; a method is pure (next: copy it first)" in text


def test_check_of_an_unknown_plugin_gets_the_nearest(cli, manager):
    result = cli("plugins", "check", "minne")
    assert result.exit_code == 2 and "did you mean 'mine'" in result.stderr


def test_new_says_what_it_made_and_what_to_type_next(cli, tmp_path):
    result = cli("plugins", "new", "method", "mine", "--out", tmp_path / "deep" / "er")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "deep" / "er" / "quantkit-mine"
    listed = [line.strip() for line in result.stdout.splitlines() if line.startswith("  ")]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert sorted(listed[:len(files)]) == files
    assert listed[len(files):] == [f"cd {folder}", 'pip install -e ".[test]"', "pytest",
                                   "quantkit quantize smollm2 --recipe int4-mine --out OUT "
                                   "&& quantkit eval smollm2 OUT --windows 4"]
    for command in listed[len(files) + 1:]:
        assert f"    {command}\n" in (folder / "README.md").read_text(encoding="utf-8")


def test_new_gives_json(cli_json, tmp_path):
    facts = cli_json("plugins", "new", "metric", "my-metric", "--out", tmp_path)
    assert (facts["name"], facts["distribution"]) == ("my_metric", "quantkit-my-metric")
    assert facts["folder"] == str(tmp_path / "quantkit-my-metric")
    assert "src/quantkit_my_metric/metric.py" in facts["files"] and len(facts["next"]) == 4


def test_errors_of_new_exit_with_2_and_say_what_to_do(cli, tmp_path):
    for arguments in (["method", "gptq"], ["method", "No Name"], ["x", "mine"], ["mine"]):
        result = cli("plugins", "new", *arguments, "--out", tmp_path)
        assert result.exit_code == 2 and "next: " in result.stderr, result.stderr
    assert not any(tmp_path.iterdir())


def test_making_one_needs_no_torch(process, tmp_path):
    done = process("plugins", "new", "metric", "mine", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "quantkit-mine" / "pyproject.toml").is_file(), done.stderr
