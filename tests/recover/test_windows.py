"""Text of a recovery: new beside the calibration's, the same each time, and enough of it."""

from __future__ import annotations

import random

import pytest
import torch

from quantkit.calibrate.prepare import prepare
from quantkit.errors import CalibrationError
from quantkit.progress import silent
from quantkit.recover.windows import recovery_text, refuses_text
from quantkit.sources.open import open_source
from quantkit.spec import CalibrationSpec
from quantkit.testing import tiny_model


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
    spec = CalibrationSpec(text=name, samples=6, length=64)
    seen = prepare(spec, source, 0).tokens
    chosen = recovery_text(spec, 16, seen, source, silent)
    assert chosen.tokens.shape == (16, 64) and chosen.held_out == 2
    known = {tuple(row) for row in seen.tolist()}
    assert not [row for row in chosen.tokens.tolist() if tuple(row) in known]
    assert len({tuple(row) for row in chosen.tokens.tolist()}) == 16
    again = recovery_text(spec, 16, seen, source, silent)
    assert torch.equal(again.tokens, chosen.tokens) and again.sha256 == chosen.sha256


@pytest.mark.parametrize("words", [60, 300])
def test_too_little_text(tmp_path, source, words):
    spec = CalibrationSpec(text=text_of(tmp_path, words), samples=2, length=32)
    seen = prepare(spec, source, 0).tokens
    with pytest.raises(CalibrationError, match="too short for 4000 windows") as caught:
        recovery_text(spec, 4000, seen, source, silent)
    assert "windows: 2000" in caught.value.next


def test_text_that_repeats_itself_is_no_new_text(tmp_path, source):
    path = tmp_path / "text.txt"
    path.write_text("the same again and again " * 4000)
    spec = CalibrationSpec(text=str(path), samples=2, length=32)
    with pytest.raises(CalibrationError, match="too short") as caught:
        recovery_text(spec, 4, prepare(spec, source, 0).tokens, source, silent)
    assert "0 windows are new" in caught.value.why


def test_which_texts_are_refused():
    assert refuses_text(CalibrationSpec()) is None
    assert "random" in refuses_text(CalibrationSpec(text="random"))
    assert "writes" in refuses_text(CalibrationSpec(text="self"))
