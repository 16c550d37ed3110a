"""The plugins of the repository, installed by pip into an empty environment as a stranger's would be."""

import csv
import functools
import json
import tomllib
from pathlib import Path

import pytest

from quantkit.checkpoint.manifest import Manifest
from quantkit.plugins.registry import FIRST_PARTY
from quantkit.testing import tiny_model
from tests.helpers.environments import ROOT, environment, install, quantkit_in

pytestmark = pytest.mark.network
FOLDERS = sorted((ROOT / "plugins").glob("quantkit-*"))
ENTRIES = {name: folder.name for folder in FOLDERS for name in tomllib.loads(
    (folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["quantkit"]}
"""Entry point → distribution."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command in an environment with all of them."""
    pytest.importorskip("hatchling", reason="needs the extra dev")
    python = environment(tmp_path_factory.mktemp("installed"))
    install(python, "--no-build-isolation", *FOLDERS)
    return functools.partial(quantkit_in, python, ENTRIES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "mistral", head_dim=32,
                      max_position_embeddings=1024)


def test_each_is_listed_and_loads(run):
    facts = json.loads(run("plugins", "list", "--json"))
    listed = {plugin["name"]: plugin for plugin in facts["plugins"] if plugin["distribution"] != "quantkit"}
    assert {name: plugin["distribution"] for name, plugin in listed.items()} == ENTRIES
    assert all(plugin["error"] is None and plugin["version"] == "0.1.0" and plugin["api"] == 1
               for plugin in listed.values())


def test_the_table_that_explains_absent_names_is_complete(run):
    facts = json.loads(run("plugins", "list", "--json"))["registered"]
    kinds = {"method": "methods", "KV policy": "kv_policies", "KV codec": "kv_codecs", "metric": "metrics",
             "reporter": "reporters", "recovery": "recoveries"}
    for kind, names in FIRST_PARTY.items():
        registered = {entry["name"]: entry["owner"] for entry in facts[kinds[kind]]} if kind in kinds else {
            recipe["name"]: recipe["owner"] for recipe in json.loads(run("recipes", "list", "--json"))}
        assert {name: owner for name, owner in registered.items() if owner != "quantkit"} == names


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ENTRIES)
def test_each_passes_the_kit(run, name):
    report = json.loads(run("plugins", "check", name, "--json"))
    statuses = {row["status"] for row in report["results"]}
    assert statuses == ({"not checked"} if name == "csv" else {"ok"})  # there is no check for reporters


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("recipe", "method"), [("int4-hqq", "hqq"), ("int4-imatrix", "imatrix")])
def test_recipes_make_checkpoints(run, tiny, tmp_path, recipe, method):
    run("quantize", tiny, "--recipe", recipe, "--out", tmp_path / "OUT", "--quiet",
        *(("--windows", 2, "--window", 64) if method == "imatrix" else ()))
    manifest = Manifest.from_bytes((tmp_path / "OUT" / "quantkit.json").read_bytes())
    assert {row.method for row in manifest.layers} == {method}
    quantkit_in(run.args[0], (), "verify", tmp_path / "OUT")  # who reads it needs no method


def test_metric_reporter_policy_and_codec_stand_in_one_comparison(run, tiny, tmp_path):
    out = tmp_path / "REPORT"
    run("eval", tiny, "--kv", "none,int6,keydiff(0.5),keydiff(0.5)+int6", "--window", 256, "--windows", 2,
        "--no-speed", "--out", out, "--quiet")
    with (out / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kv"] for row in rows] == ["none", "int6", "keydiff(0.5)", "keydiff(0.5)+int6"]
    assert all(0 <= float(row["ece"]) <= 1 and float(row["ece_low"]) <= float(row["ece"]) for row in rows)
    assert float(rows[0]["kl_mean"]) == 0 < float(rows[1]["kl_mean"]) < float(rows[2]["kl_mean"])
    assert "ECE" in (out / "report.md").read_text(encoding="utf-8")
