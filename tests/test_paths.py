from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import RecipeError, UsageError
from quantkit.evaluate.task_file import find_task
from quantkit.paths import local_path, typed_path
from quantkit.recipe import load_recipe
from quantkit.spec import CalibrationSpec

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
