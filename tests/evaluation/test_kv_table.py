"""Codec × policy × length in one table: what settings claim, and what reports say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.runtime.memory.kv import footprint

SCRIPT = Path(__file__).resolve().parents[2] / "evals" / "kv_table.py"
CODECS = ("none", "int8", "fp8", "int4", "int3", "int2", "rotation(4)", "rotation(2.5)", "int8/int4")
POLICIES = ("snapkv(0.5)", "pyramidkv(0.5)", "adakv(0.5)", "expected(0.5)", "kvzip(0.5)", "tova(0.5)",
            "window(1024, sinks=4)", "snapkv(2000)", "snapkv(0.5)+int8", "kvzip(0.5)+int8")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def config():
    """Heads and layers of SmolLM2-135M."""
    return parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 576, "head_dim": 64,
                         "intermediate_size": 64, "num_hidden_layers": 30, "num_attention_heads": 9,
                         "num_key_value_heads": 3, "max_position_embeddings": 1 << 16})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [8000, 32_000])
@pytest.mark.parametrize("kv", [*CODECS, *POLICIES])
def test_what_is_held_at_a_prompts_end_is_what_is_claimed(script, config, kv, tokens):
    """Pages of which only a part is filled are what is more: less than 3% from 8,000 tokens on, but of a
    window, which isn't longer for that, up to one page of each head."""
    found, full = (footprint(config, parse_kv(one), torch.bfloat16, tokens, tokens, 512).sequence_bytes
                   for one in (kv, "none"))
    claim, spare = script["claimed"](parse_kv(kv), tokens), 63 / 1028 if kv.startswith("window") else 0.03
    assert claim * 0.999 <= found / full <= claim * (1 + spare), (claim, found / full)


@pytest.mark.parametrize("kv", ["int4(residual_length=0)", "snapkv(2MB)"])
def test_what_it_cannot_say_is_refused(script, kv):
    with pytest.raises(ValueError, match=r"bytes|default pages"):
        script["claimed"](parse_kv(kv), 1000)


def test_reports_become_one_table(tmp_path, script):
    """All of a setting stands in its line; a codec's answers count for both kinds of question."""
    quality = {"noise_floor_kl": {"value": 0.25},
               "results": [{"kv": "none", "kl_exact": 0.25}, {"kv": "int8", "kl_exact": 0.2505}]}
    speed = {"cases": [{"kv": kv, "context": 8000, "batch": 1, "kv_bytes": size, "tok_s": {"median": pace}}
                       for kv, size, pace in (("none", 1000, 40.0), ("int8", 516, 50.0))]}
    settings = [{"kv": "none", "when": ""}, {"kv": "int8", "when": ""},
                {"kv": "snapkv(0.5)", "when": "known"}, {"kv": "snapkv(0.5)", "when": "later"}]
    answers = [("none", "known", True), ("int8", "known", False), ("int8", "known", True),
               ("snapkv(0.5)", "known", True), ("snapkv(0.5)", "later", False)]
    replies = [{"kv": kv, "task": "needle", "length": length, "when": when, "right": right}
               for kv, when, right in answers for length in (1024, 2048) if kv != "int8" or length == 1024]
    long = {"settings": settings, "replies": replies, "positions": [
        {"kv": "snapkv(0.5)", "low": 512, "high": 1024, "kl_mean": {"value": 0.0123}}]}
    paths = []
    for number, report in enumerate((quality, speed, long)):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(report))
    run = subprocess.run([sys.executable, SCRIPT, *paths], capture_output=True, text=True, check=True)
    head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in run.stdout.splitlines())
    found = {line[0]: dict(zip(head, line)) for line in lines}
    assert [*found] == ["none", "int8", "snapkv(0.5)"]
    assert found["int8"] == {
        "KV": "int8", "KL, 1,024": "0.00050", "KL, 512–1,024": "–", "needle 1,024 / 2,048, known": "1/2, –",
        "needle 1,024 / 2,048, later": "1/2, –", "tokens": "8,000", "claimed": "51.6%", "held": "51.6%",
        "held / claimed": "1.001", "decode tok/s": "50.0", "× full": "1.25"}
    snapkv = found["snapkv(0.5)"]
    assert snapkv["needle 1,024 / 2,048, known"] == "1/1, 1/1"
    assert snapkv["needle 1,024 / 2,048, later"] == "0/1, 0/1"
    assert snapkv["KL, 512–1,024"] == "0.012" and snapkv["decode tok/s"] == "–"
    paths[0].write_text(json.dumps(quality | {"results": [{"kv": "int8", "kl_exact": 1.0}]}))
    with pytest.raises(ValueError, match="two values of kl"):
        script["gather"]([quality, json.loads(paths[0].read_text())])
