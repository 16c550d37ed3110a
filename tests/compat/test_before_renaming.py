"""Files written before options were renamed still load: a recipe with `visits`, a checkpoint with
`int4(recent=32)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.checkpoint.verify import verify
from quantkit.kv.build import build_kv_codecs, build_policy
from quantkit.kvspec import parse_kv
from quantkit.quantize import quantize
from quantkit.recipe import load_recipe
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model

FILES = Path(__file__).parent / "before_renaming"
RENAMED = "the option 'visits' is now called 'descent_passes'"


@pytest.mark.filterwarnings("ignore:the option 'recent':FutureWarning")
def test_a_checkpoint_verifies_and_generates_the_same_tokens():
    report = verify(FILES / "checkpoint")
    assert report.ok, report
    loaded = load(str(FILES / "checkpoint"), device="cpu")
    assert build_kv_codecs(loaded.kv).residual_length == 32
    before = json.loads((FILES / "tokens.json").read_text(encoding="utf-8"))
    completions = generate(loaded, before["prompts"], Sampling(max_tokens=12, ignore_eos=True))
    assert [completion.token_ids for completion in completions] == before["tokens"]


def test_a_recipe_makes_what_it_makes_with_the_new_name(tmp_path):
    source = str(tiny_model(tmp_path / "source", "qwen3"))
    text = (FILES / "recipe.yaml").read_text(encoding="utf-8")
    assert "visits" in text and "recent" in text
    new = tmp_path / "recipe.yaml"
    new.write_text(text.replace("visits", "descent_passes").replace("recent", "residual_length"), "utf-8")
    with pytest.warns(FutureWarning, match=RENAMED):
        quantize(source, load_recipe(str(FILES / "recipe.yaml")), tmp_path / "old")
    quantize(source, load_recipe(str(new)), tmp_path / "new")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("old", "new")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("old", "new"), [
    ("int4(recent=32)", "int4(residual_length=32)"),
    ("rotation(3, recent=0)", "rotation(3, residual_length=0)"),
    ("kvzip(0.5, piece=100)", "kvzip(0.5, chunk=100)")])
def test_kv_settings(old, new):
    with pytest.warns(FutureWarning, match="is now called"):
        made = build_policy(parse_kv(old)), build_kv_codecs(parse_kv(old)).residual_length
    assert made == (build_policy(parse_kv(new)), build_kv_codecs(parse_kv(new)).residual_length)


def test_both_names_at_once_are_an_error():
    with pytest.raises(Exception, match="old name of residual_length"):
        build_kv_codecs(parse_kv("int4(recent=32, residual_length=32)"))
