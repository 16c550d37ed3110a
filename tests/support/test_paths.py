from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantkit.checkpoint.durable import hash_file
from quantkit.checkpoint.writer import refuse_existing
from quantkit.evaluation.tasks.file import find_task
from quantkit.quantization.calibration.files import DataFile
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.sources.local import sha256_file
from quantkit.support.errors import (
    CalibrationError,
    CheckpointError,
    RecipeError,
    SourceError,
    UsageError,
)
from quantkit.support.paths import local_path, read_regular, typed_path
from quantkit.support.strict_json import read_object

NOBODY = "~nobody-of-that-name/x"


def test_a_path_is_expanded_whether_or_not_something_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed_path("~/x") == local_path("~/x") == tmp_path / "x"
    assert typed_path("x") == Path("x")


@pytest.mark.parametrize("name, why", [(NOBODY, "home"), ("x" * 5000, "too long"), ("", "")])
def test_what_can_be_no_path(name, why):
    assert local_path(name) is None
    with pytest.raises(UsageError) as caught:
        typed_path(name)
    assert why in str(caught.value) and caught.value.next


def test_files_that_are_named_so_are_not_found():
    with pytest.raises(RecipeError):
        load_recipe(f"{NOBODY}.yaml")
    with pytest.raises(UsageError):
        find_task(f"{NOBODY}.yaml")


def test_calibration_texts_are_named_by_their_last_part():
    assert CalibrationSpec(text=(NOBODY, "/a/b.txt", "hub:o/n")).without_folders().text == (
        "x", "b.txt", "hub:o/n")


READERS = {
    "read_regular": (OSError, "any.json", lambda path: read_regular(path, 100)),
    "read_object": (SourceError, "any.json", lambda path: read_object(path, 100)),
    "hash_file": (OSError, "any.json", hash_file), "sha256_file": (SourceError, "any.json", sha256_file),
    "calibration": (CalibrationError, "any.jsonl", lambda path: DataFile("any", path).size),
    "state": (CheckpointError, "out.partial/state.json",
              lambda path: ((path.parents[1] / "out").mkdir(), refuse_existing(path.parents[1] / "out")))}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, reader, kind):
    error, name, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    with pytest.raises(error):
        read(path)


def test_a_regular_file_is_read_within_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 4)
