"""Calibration text and windows: chosen by the seed, and errors that give the numbers."""

from pathlib import Path

import pytest
import torch

from quantkit.calibrate import text as module
from quantkit.calibrate.text import calibration_text, calibration_tokens
from quantkit.errors import CalibrationError
from quantkit.spec import CalibrationSpec


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_windows_are_cut_from_the_text_without_overlap(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(0x100 + i) for i in range(100)))
    spec = CalibrationSpec(text=str(file), samples=9, length=10)
    tokens = calibration_tokens(spec, letters)
    assert tokens.dtype == torch.int64 and tokens.shape == (9, 10)
    starts = (tokens[:, 0] - 0x100).tolist()
    assert len(set(starts)) == 9 and all(start % 10 == 0 for start in starts)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))


def test_the_seed_chooses(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(0x100 + i) for i in range(800)))
    one, same, other = (calibration_tokens(
        CalibrationSpec(text=str(file), samples=4, length=8, seed=seed), letters) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_builtin_is_long_enough_for_the_default() -> None:
    """At four characters a token, which is what tokenizers of this field reach on English."""
    spec = CalibrationSpec()
    tokens = calibration_tokens(spec, lambda text: list(range(len(text) // 4)))
    assert tokens.shape == (32, 512)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "is empty"), (b" \n ", "is empty"), (b"caf\xe9 noir", "not UTF-8"), (None, "can't be read")])
def test_unusable_files(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CalibrationError, match=said) as caught:
        calibration_text(CalibrationSpec(text=str(file)))
    assert str(file) in caught.value.what and caught.value.next


def test_a_folder_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="can't be read"):
        calibration_text(CalibrationSpec(text=str(tmp_path)))


def test_a_large_file_is_read_in_part_even_inside_a_character(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    spec = CalibrationSpec(text=str(file), samples=1, length=8)
    limit = 8 * module.BYTES_PER_TOKEN
    file.write_text("x" * (limit - 1) + "é" * 1000, encoding="utf-8")
    assert calibration_text(spec) == "x" * (limit - 1)
    file.write_text("x" * (limit - 1) + "é", encoding="utf-8")
    assert calibration_text(spec) == "x" * (limit - 1)
    file.write_bytes(b"x" * 5 + b"\xc3")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        calibration_text(spec)


@pytest.mark.parametrize(("size", "advice"), [(39, "samples: 3"), (9, "length: 9")])
def test_too_short_says_by_how_much(tmp_path: Path, size: int, advice: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text("x" * size)
    with pytest.raises(CalibrationError, match=f"has {size} tokens, 40 are needed") as caught:
        calibration_tokens(CalibrationSpec(text=str(file), samples=4, length=10), letters)
    assert advice in str(caught.value.next)


def test_a_python_without_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prose", lambda characters: "")
    with pytest.raises(CalibrationError, match="built-in calibration text is empty"):
        calibration_text(CalibrationSpec())
