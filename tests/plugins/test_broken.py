"""All broken plugins are installed at once: every command works and says of each what is wrong, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from quantkit.testing import tiny_model
from tests.plugins.broken import BROKEN, LOADING

BY_NAME = {plugin.name: plugin for plugin in BROKEN}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for plugin in BROKEN:
        plugin.install(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def run(site):
    """The command, with these plugins and no other."""

    def call(*arguments, plugins=None):
        env = {**os.environ, "QUANTKIT_PLUGINS": ",".join(BY_NAME) if plugins is None else plugins,
               "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(site)])}
        return subprocess.run([sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)], env=env,
                              capture_output=True, text=True, timeout=300)

    return call


@pytest.fixture(scope="module")
def outputs(run, tiny, tmp_path_factory):
    """What each command answered, with all of them installed."""
    out = tmp_path_factory.mktemp("out") / "OUT"
    return {"--help": run("--help"), "plugins list": run("plugins", "list"), "doctor": run("doctor"),
            "quantize": run("quantize", tiny, "--recipe", "int8", "--out", out),
            "generate": run("generate", out, "Hello", "--max-tokens", "2"),
            "inspect": run("inspect", tiny)}


def warned(stderr):
    return [line for line in stderr.splitlines() if line.startswith("warning: ")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", LOADING)
def test_every_command_works(outputs, command):
    assert outputs[command].returncode == 0, outputs[command].stderr
    assert "internal error" not in outputs[command].stderr
    assert "Traceback" not in outputs[command].stderr


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [plugin.name for plugin in BROKEN if plugin.says])
@pytest.mark.parametrize("command", LOADING)
def test_what_is_wrong_is_said_once(outputs, command, name):
    plugin = BY_NAME[name]
    named = [line for line in warned(outputs[command].stderr)
             if plugin.says in line and plugin.distribution in line]
    assert len(named) == (command in plugin.when), "\n".join(warned(outputs[command].stderr))


@pytest.mark.parametrize("command", LOADING)
def test_there_is_no_other_warning(outputs, command):
    lines = warned(outputs[command].stderr)
    expected = [plugin for plugin in BROKEN if plugin.says and command in plugin.when]
    assert len(lines) == len(expected), "\n".join(lines)
    assert max(Counter(lines).values(), default=1) == 1


def test_the_list_tells_all(run):
    facts = json.loads(run("plugins", "list", "--json").stdout)
    plugins = {plugin["name"]: plugin for plugin in facts["plugins"]}
    assert set(plugins) == {"quantkit", *BY_NAME}
    for name, plugin in BY_NAME.items():
        assert plugins[name]["distribution"] == plugin.distribution and plugins[name]["version"] == "1.0"
        if plugin.caught.startswith("the plugin manager when"):
            assert plugins[name]["error"], name
        else:
            assert plugins[name]["error"] is None, name
            assert bool(plugins[name]["refused"]) == plugin.caught.startswith("the registry"), name
    assert plugins["nohook"]["file"].endswith("broken_nohook.py")
    assert [plugins[name]["api"] for name in ("first", "newer")] == [1, None]
    kernels = {entry["name"]: entry for entry in facts["registered"]["kernels"]}
    assert kernels["kernelimport"]["distribution"] == "broken-kernelimport"
    assert kernels["kernelimport"]["file"].endswith("broken_kernelimport_kernel.py")
    assert "half" not in {entry["name"] for entry in facts["registered"]["methods"]}


def test_a_contested_name_says_who_contest_it(run, tiny, tmp_path):
    recipe = tmp_path / "shared.yaml"
    recipe.write_text("rules: [{match: '*', method: shared, "
                      "spec: {bits: 4, granularity: {strategy: channel}}}]")
    done = run("quantize", tiny, "--recipe", recipe, "--dry-run")
    assert done.returncode == 1
    assert "error: method 'shared' is registered twice, by broken-first and by broken-second" in done.stderr
    assert "pip uninstall broken-second" in done.stderr and "QUANTKIT_PLUGINS" in done.stderr


def test_a_model_of_a_broken_architecture_names_the_plugin(run, tmp_path):
    folder = tiny_model(tmp_path / "family")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "broken_family"}))
    done = run("generate", folder, "Hello", plugins="archimport")
    assert done.returncode == 1
    assert ("error: architecture 'broken_family' of broken-archimport 1.0 (plugin 'archimport') can't be "
            "loaded" in done.stderr)
    assert "next: quantkit plugins check archimport" in done.stderr


@pytest.mark.parametrize(("kv", "plugin", "problem"), [
    ("broken_policy(4)", "policytype", "is the class Policy"),
    ("broken_codec", "codecabstract", "is the class Codec, which lacks keys")])
def test_a_broken_kv_setting_names_the_plugin(run, tiny, kv, plugin, problem):
    done = run("generate", tiny, "Hello", "--kv", kv, plugins=plugin)
    assert done.returncode == 1, done.stderr
    assert f"broken-{plugin} 1.0" in done.stderr and problem in done.stderr


def test_a_command_of_the_wrong_type_is_named(run):
    done = run("broken-command", plugins="commandtype")
    assert done.returncode == 1
    assert "broken-commandtype 1.0 (plugin 'commandtype') is a function" in done.stderr
    assert "click.Command" in done.stderr


def test_an_error_of_a_plugins_code_is_not_ours(run, tiny, tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("rules: [{match: '*', method: broken_method, "
                      "spec: {bits: 4, granularity: {strategy: channel}}}]")
    done = run("quantize", tiny, "--recipe", recipe, "--out", tmp_path / "OUT", plugins="methodraises,first")
    assert done.returncode == 1
    assert "error: plugin 'methodraises' of broken-methodraises 1.0 failed: KeyError: 'absent'" in done.stderr
    assert "broken_methodraises_method.py:5 in quantize" in done.stderr
    assert ("next: quantkit plugins check methodraises, or leave it out: QUANTKIT_PLUGINS=first quantkit …"
            in done.stderr)
    assert "internal error" not in done.stderr and "report" not in done.stderr


def test_an_error_of_a_plugins_policy_while_a_model_runs(run, tiny):
    done = run("generate", tiny, "Hello Hello Hello Hello Hello Hello", "--kv", "broken_raises(4)",
               plugins="policyraises")
    assert done.returncode == 1
    assert ("error: plugin 'policyraises' of broken-policyraises 1.0 failed: ZeroDivisionError: no scores"
            in done.stderr)
    assert "broken_policyraises_policy.py:" in done.stderr and "in score" in done.stderr


def test_the_process_that_measures_speed_says_it_in_the_same_words(site, tiny, run):
    """``quantkit.evaluation.speed.worker`` answers a request."""
    request = {"uri": str(tiny), "revision": None, "dtype": "auto", "device": "cpu", "ids": [1] * 32,
               "settings": {"contexts": [], "prefill": 32, "decode": 2, "repeats": 1}, "threads": 1,
               "kv": "broken_raises(4)"}
    env = {**os.environ, "QUANTKIT_PLUGINS": "policyraises",
           "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(site)])}
    done = subprocess.run([sys.executable, "-m", "quantkit.evaluation.speed.worker"], env=env,
                          input=json.dumps(request), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    what, why, then = json.loads(done.stdout.splitlines()[-1])["error"]
    assert what == "plugin 'policyraises' of broken-policyraises 1.0 failed: ZeroDivisionError: no scores"
    assert "in score" in why and then.startswith("quantkit plugins check policyraises")


def test_walked_tables_pass_over_what_is_broken(site):
    code = ("import warnings\nfrom quantkit.plugins.manager import registry\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    for _ in range(2):\n"
            "        names = [name for name, _ in registry('metrics').usable()]\n"
            "        shown = [name for name, _ in registry('reporters').usable()]\n"
            "print(names, shown)\nprint(*(w.message for w in caught), sep='\\n')\n")
    env = {**os.environ, "QUANTKIT_PLUGINS": "metrictype,reportertype",
           "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(site)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    names, *lines = done.stdout.splitlines()
    assert names == ("['perplexity', 'kl', 'top1'] ['table', 'json', 'markdown', 'html', 'junit', "
                     "'model_card', 'svg', 'png']"), done.stderr
    assert len(lines) == 2
    assert "broken-metrictype 1.0" in lines[0] and "quantkit.evaluation.metrics.Metric" in lines[0]
    assert "broken-reportertype 1.0" in lines[1] and "quantkit.evaluation.report.base.Reporter" in lines[1]


def test_a_file_of_entry_points_that_cannot_be_read_costs_only_its_distribution(tmp_path):
    """One malformed line makes Python's own lookup fail for every distribution."""
    sound = tmp_path / "sound-1.0.dist-info"
    sound.mkdir()
    (sound / "METADATA").write_text("Metadata-Version: 2.1\nName: sound\nVersion: 1.0\n")
    (sound / "entry_points.txt").write_text("[quantkit]\nsound = soundplugin\n")
    (tmp_path / "soundplugin.py").write_text("from quantkit.plugins.hooks import hookimpl\n\n@hookimpl\n"
                                             "def recipe_dirs():\n    return []\n")
    info = tmp_path / "garbled-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: garbled\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quantkit]\nno equals sign\n")
    env = {name: value for name, value in os.environ.items() if name != "QUANTKIT_PLUGINS"}
    env["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", "plugins", "list"], env=env,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "rtn" in done.stdout and "sound" in done.stdout
    assert len(warned(done.stderr)) == 1 and "garbled-1.0.dist-info can't be read" in done.stderr
