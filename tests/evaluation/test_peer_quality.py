"""The comparison with other tools: its variants, its tables, and a run that is stopped and goes on."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.quantization.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "evals" / "peers"
DIM = 32
HIDDEN = 64
LAYERS = 1
HEADS = 2
KV_HEADS = 1
VOCABULARY = 270
TEXTS = ["wiki.txt", "novel.txt", "chats.txt", "code.txt", "german.txt"]
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


@pytest.fixture(scope="module")
def story_files(tmp_path_factory):
    """A model and a vocabulary in llama2.c's layout: bytes and a few pairs."""
    folder = tmp_path_factory.mktemp("stories")
    kv = DIM // HEADS * KV_HEADS
    sizes = [VOCABULARY * DIM, LAYERS * DIM, LAYERS * DIM * DIM, LAYERS * kv * DIM, LAYERS * kv * DIM,
             LAYERS * DIM * DIM, LAYERS * DIM, LAYERS * HIDDEN * DIM, LAYERS * DIM * HIDDEN,
             LAYERS * HIDDEN * DIM, DIM]
    generator = np.random.default_rng(0)
    values = [np.ones(size, np.float32) if size == DIM else generator.normal(0, 0.2, size).astype(np.float32)
              for size in sizes]
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, 64)
    (folder / "model.bin").write_bytes(header + b"".join(part.tobytes() for part in values))
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)),
              " t", "he", " the", "a", "b", "e", "h", "t", " ", "n", "d"][:VOCABULARY]
    content = struct.pack("<i", 7)
    for number, token in enumerate(tokens):
        content += struct.pack("<fi", -float(number), len(token.encode())) + token.encode()
    (folder / "tokens.bin").write_bytes(content)
    return folder


def test_variants_have_names_of_their_own(peers):
    """Each fits its label, its script is there, and its recipe is shipped."""
    from quality import HERE, SCRIPTS
    from quality_table import LABEL
    from quality_variants import CalibrationKind, variants

    for group in (64, -1):
        everything = variants(group)
        assert len({variant.key for variant in everything}) == len(everything) > 60
        assert max(len(f"{variant.peer} {variant.name}*") for variant in everything) <= LABEL
        kinds = [variant.calibration for variant in everything]
        assert kinds == sorted(kinds, key=list(CalibrationKind).index) and set(kinds) == set(CalibrationKind)
        for variant in everything:
            assert variant.peer == "ours" or (HERE / SCRIPTS[variant.peer]).exists()
            if recipe := variant.spec.get("recipe"):
                text = getattr(load_recipe(recipe).calibration, "text", None)
                assert (text == "random") == ("datafree" in recipe)


def test_a_recipe_gets_another_grain(peers, tmp_path):
    from quality_variants import SHIPPED, recipe_text

    for name in SHIPPED:
        content = recipe_text((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"),
                              "{strategy: channel}")
        (tmp_path / "recipe.yaml").write_text(content, encoding="utf-8")
        specs = [rule.spec for rule in load_recipe(str(tmp_path / "recipe.yaml")).rules if rule.spec]
        assert specs and all(spec.granularity.strategy != "group" for spec in specs)


def row(peer: str, name: str, bits: int, kl: float, **more: object) -> dict:
    scores = {text: {"weights": {"kl": kl * (number + 1), "perplexity": 20.0, "top1": 0.9,
                                 "half": {"kl": kl, "perplexity": 20.0, "top1": 0.9}}}
              for number, text in enumerate(TEXTS)}
    return {"peer": peer, "name": name, "bits": bits, "bits_per_weight": bits + 0.25, "cpu_s": 600.0,
            "texts": scores, **more}


def test_tables_are_grouped_and_fit_a_terminal(peers):
    from quality_table import tables

    rows = [row("", "unquantized", 16, 0.0, calibration="none"),
            row("hqq", "int4", 4, 0.2, calibration="none"),
            row("sinq", "int4", 4, 0.1, calibration="none"),
            row("ours", "recipe int4 default", 4, 0.3, calibration="default"),
            row("llmcompressor", "autoround int4 asym", 4, 0.05, calibration="near"),
            row("llama.cpp", "Q4_K_M imatrix", 4, 0.05, calibration="near"),
            {"peer": "gptqmodel", "name": "gptq int4 default", "bits": 4, "calibration": "default",
             "failed": "ValueError: a calibration dataset is required " + "and so on " * 20}]
    report = {"texts": TEXTS, "rows": rows, "windows": 8, "window": 512, "samples": 32,
              "calibration": "near.txt"}
    lines = tables(report).splitlines()
    assert max(map(len, lines)) <= 80
    titles = [next(number for number, line in enumerate(lines) if line.startswith(title))
              for title in ("Data-free", "Calibrated on what a tool takes", "Calibrated on near.txt")]
    assert titles == sorted(titles)
    first = next(line for line in lines if line.startswith("sinq int4")).split()
    assert first == ["sinq", "int4", "4.25", "0.3", "0.5", "german", "10.0", "<"]
    assert any("a calibration dataset is required" in line for line in lines)


def test_rows_of_earlier_reports_are_read(peers):
    from quality_table import calibration_of

    names = {"int4": "near", "recipe int4 as typed": "default", "gptq int4 asym self": "self"}
    for name, kind in names.items():
        assert calibration_of({"name": name, "calibrated": True}) == kind
    assert calibration_of({"name": "nf4", "calibrated": False}) == "none"


def test_stored_parts_are_counted_and_a_plain_weight_is_refused(peers, tmp_path):
    import common

    save_file({"a.codes": torch.zeros(6, dtype=torch.uint8), "a.scale": torch.zeros(2, dtype=torch.float16),
               "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert common.stored_bits(tmp_path, ["a"]) == 80
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "rest.safetensors")
    with pytest.raises(SystemExit, match="left as it is"):
        common.stored_bits(tmp_path, ["a"])


def test_stories_become_the_same_model(peers, story_files, tmp_path):
    from quality_models import write_folder
    from stories_gguf import convert

    convert(story_files / "model.bin", story_files / "tokens.bin", tmp_path / "model.gguf")
    write_folder(tmp_path / "model.gguf", tmp_path / "model", torch.float32, 64)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    values = np.frombuffer((story_files / "model.bin").read_bytes(), np.float32, offset=28)
    embedding = torch.from_numpy(values[:VOCABULARY * DIM].copy()).view(VOCABULARY, DIM)
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (DIM, HIDDEN)
    last = torch.from_numpy(values[-DIM - HIDDEN * DIM:-DIM].copy()).view(HIDDEN, DIM)
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], last)
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == 64 and config["num_key_value_heads"] == KV_HEADS


def test_a_run_goes_on_where_it_stopped(peers, story_files, tmp_path):
    """What has a result is not made again; what failed is, and is reported with its reason."""
    from stories_gguf import convert

    convert(story_files / "model.bin", story_files / "tokens.bin", tmp_path / "model.gguf")
    for name in ("near.txt", "far.txt"):
        (tmp_path / name).write_text("the hat and the band then bathed " * 40, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, theirs=str(PEERS / "theirs"),
                                  calls=str(tmp_path / "calls")), encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, str(PEERS / "quality.py"), "--gguf", str(tmp_path / "model.gguf"),
               "--dtype", "F32", "--context", "64", "--group", "-1", "--calibration",
               str(tmp_path / "near.txt"), "--text", str(tmp_path / "near.txt"), str(tmp_path / "far.txt"),
               "--work", str(tmp_path / "work"), "--calibration-windows", "2", "--windows", "2",
               "--window", "32", "--threads", "1", "--python", f"hqq={python}", f"gptqmodel={python}",
               "--out", str(tmp_path / "report.json"), "--only", "hqq-int[42]", "gptqmodel-gptq-int4*"]
    for turn in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
        assert calls == ["4 False", "2 False", "4 False", "4 True"] + ["2 False"] * (turn - 1)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    rows = {f"{row['peer']} {row['name']}".strip(): row for row in report["rows"]}
    assert rows["hqq int2"]["failed"] == "ValueError: no two bits here"
    assert 0 < rows["gptqmodel gptq int4"]["texts"]["far.txt"]["weights"]["kl"] < 1e-4
    kinds = [rows[f"gptqmodel gptq int4{ending}"]["calibration"] for ending in ("", " default")]
    assert kinds == ["near", "default"]
    assert "hqq int4" in done.stdout and "no two bits here" in done.stdout
