"""The check of a GPU's results, with the CPU in a GPU's place."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from quantkit.runtime.loader import load
from quantkit.support.paths import data_dir
from quantkit.testing import tiny_model

ARGUMENTS = ("--recipe", "none,int4-rtn", "--kv", "none,int8", "--window", "96", "--windows", "1")


def run(model, *arguments):
    script = str(data_dir("evals") / "on_gpu.py")
    return subprocess.run([sys.executable, script, str(model), *ARGUMENTS, *arguments], capture_output=True,
                          text=True, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_every_way_is_compared_with_the_exact_one(model, tmp_path):
    out = tmp_path / "found.json"
    done = run(model, "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "0.02 is allowed" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["label"], row["kv"]) for row in rows] == [
        (label, kv) for label in ("bf16", "rtn int6 g64 asym, rtn int4 g64 sym") for kv in ("none", "int8")]
    for row in rows:
        assert row["exact"]["kl_mean"] == 0
        assert -1e-6 < row["portions"]["kl_mean"] < 0.02 and row["portions"]["kl_mean"] != 0
        assert row["one_by_one"]["kl_mean"] == pytest.approx(row["portions"]["kl_mean"], rel=0.2, abs=1e-6)
        assert row["cpu"] == row["portions"]


def test_all_windows_share_a_cache(model, monkeypatch):
    """On a GPU a cache takes all memory that is left, and graphs are made for it."""
    spec = importlib.util.spec_from_file_location("on_gpu", data_dir("evals") / "on_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = []

    class Counted(module.KVCache):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(module, "KVCache", Counted)
    models = tuple(load(str(model), dtype="float32", device="cpu") for _ in range(3))
    tokens = torch.arange(3 * 40).view(3, 40) % 250
    both = module.check("", "int8", tokens, models)
    assert len(made) == 3 and all(cache.allocated_bytes == 0 for cache in made)
    assert both["portions"] == both["cpu"] and both["one_by_one"]["kl_mean"] == pytest.approx(0, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(model, tmp_path):
    done = run(model)
    assert done.returncode == 0, done.stdout + done.stderr
