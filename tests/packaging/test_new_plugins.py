"""A plugin of every kind, made by ``plugins new`` and installed by pip, shows up where its kind is used."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from quantkit.testing import tiny_model
from quantkit.testing.scaffold.kinds import KINDS
from quantkit.testing.scaffold.render import make_plugin
from tests.helpers.environments import environment, install, quantkit_in

pytestmark = pytest.mark.network
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """An environment's python, and a plugin of every kind that pip installed there."""
    pytest.importorskip("hatchling", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("installed")
    made = {kind: make_plugin(KINDS[kind].example, kind, folder / "made") for kind in KINDS}
    python = environment(folder)
    install(python, "--no-build-isolation", *(plugin.folder for plugin in made.values()))
    for plugin in made.values():
        shutil.rmtree(plugin.folder)  # what runs is what was installed
    return python, made


@pytest.fixture
def run(plugins):
    """The command there."""
    return functools.partial(quantkit_in, plugins[0], [plugin.names.name for plugin in plugins[1].values()])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024)


def test_all_are_listed(run, plugins):
    facts = json.loads(run("plugins", "list", "--json"))
    listed = {plugin["name"]: plugin for plugin in facts["plugins"]}
    for kind, plugin in plugins[1].items():
        assert listed[plugin.names.name]["distribution"] == plugin.names.distribution
        assert listed[plugin.names.name]["error"] is None
        if (registry := KINDS[kind].registry) is not None:
            entries = {entry["name"]: entry["owner"] for entry in facts["registered"][registry]}
            assert entries[plugin.names.registered] == plugin.names.distribution


def test_recipes_and_suites(run, tiny):
    recipes = {recipe["name"] for recipe in json.loads(run("recipes", "list", "--json"))}
    assert {"int4-v8", "int4-clipped", "int4-equalize", "int8-rowwise"} <= recipes
    result = json.loads(run("eval", tiny, "--suite", "long-windows", "--windows", 1, "--no-speed", "--json"))
    assert result["protocol"]["window"] == 1024


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("recipe", "word"), [("int4-clipped", "clipped"), ("int4-equalize", "rtn"),
                                              ("int8-rowwise", "rowwise"), ("int4-v8", "rtn")])
def test_weights(run, tiny, tmp_path, recipe, word):
    out = tmp_path / "OUT"
    run("quantize", tiny, "--recipe", recipe, "--out", out, "--quiet")
    run("verify", out)
    assert word in run("inspect", out, "--json")
    result = json.loads(run("eval", tiny, out, "--window", 64, "--windows", 2, "--no-speed", "--json"))
    assert 0 < result["results"][1]["kl_mean"] < 1
    if recipe.startswith("int4-"):
        plain = tmp_path / "PLAIN"
        run("quantize", tiny, "--recipe", "int4-rtn", "--out", plain, "--quiet")
        assert (plain / "model.safetensors").read_bytes() != (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_kernel(run, tiny, tmp_path):
    assert "blockwise" in run("doctor")
    run("quantize", tiny, "--recipe", "int4-rtn", "--out", tmp_path / "OUT", "--quiet")
    kernels = {row["kernels"]["decode"]["kernel"] for row in json.loads(
        run("inspect", tmp_path / "OUT", "--json"))["layers"] if row.get("kernels")}
    assert "blockwise" in kernels


def test_the_kv_cache(run, tiny):
    result = json.loads(run("eval", tiny, "--kv", 'none,uint8,keynorm(0.5,window=4)', "--window", 128,
                            "--windows", 2, "--no-speed", "--json"))
    assert [row["kv"] for row in result["results"]] == ["none", "uint8", "keynorm(0.5, window=4)"]


def test_sources_families_and_commands(run, tiny, tmp_path):
    shutil.make_archive(str(tmp_path / "tiny"), "zip", tiny)
    counts = json.loads(run("sizes", f"zip:{tmp_path / 'tiny.zip'}", "--json"))
    assert counts == json.loads(run("sizes", tiny, "--json"))
    assert "sizes" in run("--help") and "MODEL" in run("sizes", "--help")
    family = tmp_path / "family"
    shutil.copytree(tiny, family)
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed |= {"model_type": "renamed", "architectures": ["RenamedForCausalLM"]}
    (family / "config.json").write_text(json.dumps(renamed), encoding="utf-8")
    answers = [run("generate", model, "the", "-n", 4, "--quiet") for model in (family, tiny)]
    assert answers[0] == answers[1]


def test_metrics_and_reporters(run, tiny, tmp_path):
    result = json.loads(run("eval", tiny, "--window", 64, "--windows", 2, "--no-speed", "--json", "--out",
                            tmp_path / "REPORT"))
    assert result["results"][0]["top5"] == 1
    (line,) = (tmp_path / "REPORT" / "jsonl.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["top5"] == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["clipped", "quantkit-sizes", "int4-v8"])
def test_they_can_be_checked(run, name):
    assert " ok, 0 failed, 0 not checked" in run("plugins", "check", name)


@pytest.mark.slow
def test_an_editable_one_follows_its_folder(tmp_path):
    """pip builds it apart from this environment, which hatchling needs for editable installs."""
    plugin = make_plugin("sizes", "command", tmp_path)
    python = environment(tmp_path)
    install(python, "-e", plugin.folder)
    assert "parameters by part" in quantkit_in(python, [plugin.names.name], "sizes", "--help")
    file = plugin.folder / "src" / "quantkit_sizes" / "command.py"
    changed = file.read_text(encoding="utf-8").replace("parameters by part", "weights")
    file.write_text(changed, encoding="utf-8")
    assert "weights" in quantkit_in(python, [plugin.names.name], "sizes", "--help")
