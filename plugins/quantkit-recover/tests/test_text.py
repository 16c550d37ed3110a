"""Text of a recovery: new beside the calibration's, the same each time, and enough of it."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

import quantkit_recover
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import current
from quantkit.quantization.calibration.data import prepare
from quantkit.quantization.recipe import CalibrationSpec, Recipe, RecoverySpec, Rule
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.support.errors import CalibrationError
from quantkit.support.progress import silent
from quantkit.testing import tiny_model
from quantkit_recover import walk
from quantkit_recover.text import reason_against_text, recovery_text


@pytest.fixture
def plugin():
    current.cache_clear()
    current().add(quantkit_recover, "quantkit-recover", version="0.1")
    yield
    current.cache_clear()


@pytest.fixture
def source(tmp_path):
    return open_source(str(tiny_model(tmp_path / "tiny")))


def text_of(tmp_path, words):
    path = tmp_path / "text.txt"
    numbers = random.Random(0)
    path.write_text(" ".join(f"word{numbers.randrange(10**6)}" for _ in range(words)))
    return str(path)


@pytest.mark.parametrize("text", ["builtin", "file"])
def test_no_window_is_of_the_calibration(tmp_path, source, text):
    name = "builtin" if text == "builtin" else text_of(tmp_path, 3000)
    spec = CalibrationSpec(text=name, windows=6, window=64)
    seen = prepare(spec, source, 0).tokens
    chosen = recovery_text(spec, 16, seen, source, silent)
    assert chosen.tokens.shape == (16, 64) and chosen.held_out == 2
    known = {tuple(row) for row in seen.tolist()}
    assert not [row for row in chosen.tokens.tolist() if tuple(row) in known]
    assert len({tuple(row) for row in chosen.tokens.tolist()}) == 16
    again = recovery_text(spec, 16, seen, source, silent)
    assert torch.equal(again.tokens, chosen.tokens) and again.sha256 == chosen.sha256


@pytest.mark.parametrize("words", [100, 300])
def test_too_little_text_and_how_many_windows_it_has(tmp_path, source, words):
    spec = CalibrationSpec(text=text_of(tmp_path, words), windows=2, window=32)
    seen = prepare(spec, source, 0).tokens
    with pytest.raises(CalibrationError, match="too short for 4000 windows") as caught:
        recovery_text(spec, 4000, seen, source, silent)
    enough = int(re.search(r"windows: (\d+)}", caught.value.next).group(1))
    assert len(recovery_text(spec, enough, seen, source, silent).tokens) == enough
    with pytest.raises(CalibrationError, match="too short"):
        recovery_text(spec, enough + 1, seen, source, silent)


def test_text_that_repeats_itself_is_no_new_text(tmp_path, source):
    path = tmp_path / "text.txt"
    path.write_text("the same again and again " * 4000)
    spec = CalibrationSpec(text=str(path), windows=2, window=32)
    with pytest.raises(CalibrationError, match="too short") as caught:
        recovery_text(spec, 4, prepare(spec, source, 0).tokens, source, silent)
    assert "of 6 windows 0 are new" in caught.value.why and "the other 6 repeat them" in caught.value.why
    assert caught.value.next == "give more text, or fewer windows in the recipe"


@pytest.mark.parametrize("length", [128, 256])
def test_chats_that_begin_alike_are_new_text(tmp_path, source, length):
    numbers = random.Random(0)

    def words():
        return " ".join(f"word{numbers.randrange(10**6)}" for _ in range(30))

    system = {"role": "system", "content": "You are a helpful assistant. Answer briefly, and in English."}
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [
        system, {"role": "user", "content": words()}, {"role": "assistant", "content": words()}]}) + "\n"
        for _ in range(100)))
    spec = CalibrationSpec(text=str(path), windows=8, window=length)
    seen = prepare(spec, source, 0).tokens
    chosen = recovery_text(spec, 16, seen, source, silent)
    assert len(chosen.tokens) == len(chosen.origins) == 16 and chosen.origins[0].startswith("chats.jsonl")
    known = {tuple(row[-32:]) for row in seen.tolist()}
    assert not [row for row in chosen.tokens.tolist() if tuple(row[-32:]) in known]


def test_a_text_that_models_are_evaluated_on_is_warned_of(tmp_path, source):
    from pydoc_data.topics import topics

    path = tmp_path / "topics.txt"
    path.write_text("\n".join(map(str, topics.values())))
    spec = CalibrationSpec(text=str(path), windows=2, window=64)
    with pytest.warns(UserWarning, match="recovery windows share up to 100%"):
        recovery_text(spec, 8, torch.zeros(0, 64, dtype=torch.int64), source, silent)


def test_windows_fit_the_model(source):
    spec = CalibrationSpec(windows=2, window=100_000)
    with pytest.raises(CalibrationError, match="longer than the model's context"):
        recovery_text(spec, 8, torch.zeros(0, 100_000, dtype=torch.int64), source, silent)


def test_windows_that_were_seen_twice_are_not_new(source):
    spec = CalibrationSpec(windows=2, window=32)
    chosen = recovery_text(spec, 8, torch.zeros(0, 32, dtype=torch.int64), source, silent)
    again = recovery_text(spec, 8, chosen.tokens[:2].repeat(2, 1), source, silent)
    first, second = chosen.tokens[:2].tolist()
    assert first not in again.tokens.tolist() and second not in again.tokens.tolist()


def test_which_texts_are_refused():
    assert reason_against_text(CalibrationSpec()) is None
    assert "random" in reason_against_text(CalibrationSpec(text="random"))
    assert "writes" in reason_against_text(CalibrationSpec(text="self"))


@pytest.mark.parametrize("place", [0, 15])
def test_a_window_that_overflows_is_named(plugin, tmp_path, monkeypatch, place):
    """A training window by the original, a held-out window by the quantized model."""
    source = open_source(str(tiny_model(tmp_path / "tiny")))
    spec = CalibrationSpec(windows=4, window=32)
    origin = recovery_text(spec, 16, prepare(spec, source, 0).tokens, source, silent).origins[place]
    int2 = QuantSpec(bits=2, symmetric=False, granularity=Granularity(strategy="group", size=16))
    recipe = Recipe(name="r", calibration=spec, recover=RecoverySpec(name="distill", windows=16), rules=(
        Rule(match="lm_head", optional=True), Rule(match="*", method="gptq", spec=int2)))
    real = walk.check_finite_states

    def require(states, first, what, layer):
        states = states.clone()
        held_out = len(states) == 2
        if first <= place < first + len(states) or (held_out and place == 15):
            states[1 if held_out else place - first, 0, 0] = torch.nan
        real(states, first, what, layer)

    monkeypatch.setattr(walk, "check_finite_states", require)
    with pytest.raises(CalibrationError) as caught:
        quantize(source.uri, recipe, tmp_path / "out")
    assert f"in recovery window {place} ({origin})" in caught.value.what
