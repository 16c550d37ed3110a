"""Other tools' quantizers: their variants, what counts as stored, and a run that is stopped and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.testing import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "evals" / "peers"
FAKE = """#!{python}
import json, sys
sys.path[:0] = [{theirs!r}]
import common
def make(model, tokens, spec, scratch):
    open({calls!r}, "a").write(f"{{spec['bits']}} {{tokens is not None}}\\n")
    if spec["bits"] == 2:
        raise ValueError("no two bits here")
    return {{name: common.load_file(model / "model.safetensors")[f"{{name}}.weight"].half().float()
            for name in common.linears(model)}}, 16.0, {{}}
sys.argv[:1] = []
common.main(make, [])
"""


@pytest.fixture
def peers(monkeypatch):
    """The scripts' modules, which import one another by their bare names."""
    before = set(sys.modules)
    for folder in (PEERS / "theirs", PEERS):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PEERS)):
            del sys.modules[name]


def test_variants_have_names_of_their_own(peers):
    from quantize_theirs import TOOLS, variants
    from weights import PACKAGES

    for group in (64, -1):
        everything = variants(group)
        assert len({variant.key for variant in everything}) == len(everything) > 40
        assert {variant.tool for variant in everything} == set(TOOLS)
        order = list(dict.fromkeys(variant.calibration for variant in everything))
        assert order == ["none", "default", "near"]
    assert [function.__name__ for function in PACKAGES] == list(TOOLS)


def test_stored_parts_are_counted_and_a_plain_weight_is_refused(peers, tmp_path):
    import common

    save_file({"a.codes": torch.zeros(6, dtype=torch.uint8), "a.scale": torch.zeros(2, dtype=torch.float16),
               "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert common.stored_bits(tmp_path, ["a"]) == 80
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "rest.safetensors")
    with pytest.raises(SystemExit, match="left as it is"):
        common.stored_bits(tmp_path, ["a"])


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    """What is there is not made again; what failed is, and is kept with its reason."""
    model = tiny_model(tmp_path / "tiny")
    near = tmp_path / "near.txt"
    near.write_text("the cat sat on the mat and the dog " * 80, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, theirs=str(PEERS / "theirs"),
                                  calls=str(tmp_path / "calls")), encoding="utf-8")
    python.chmod(0o755)
    work = tmp_path / "work"
    command = [sys.executable, str(PEERS / "quantize_theirs.py"), "--model", str(model), "--calibration",
               str(near), "--work", str(work), "--windows", "2", "--window", "32", "--threads", "1",
               "--python", f"hqq={python}", f"gptqmodel={python}", "--only", "hqq-int[42]",
               "gptqmodel-gptq-int4*"]
    for turn in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
        assert calls == ["4 False", "2 False", "4 False", "4 True"] + ["2 False"] * (turn - 1)
        assert "no two bits here" in done.stdout
    assert json.loads((work / "hqq-int2.json").read_text())["failed"] == "ValueError: no two bits here"
    facts = json.loads((work / "gptqmodel-gptq-int4.json").read_text())
    assert facts["calibration"] == "near" and facts["bits_per_weight"] > 0
    plain, quantized = (load_file(work / name / "model.safetensors")
                        for name in ("plain", "gptqmodel-gptq-int4"))
    assert plain.keys() == quantized.keys()
    assert all(torch.allclose(plain[name].float(), quantized[name], atol=1e-2) for name in plain)
