"""Folders that another run removes meanwhile."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from quantkit.checkpoint.durable import FolderLock, bytes_in, names_in
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.support.errors import CheckpointError


def test_a_folder_that_its_run_has_just_removed_is_another_run_s(tmp_path):
    """Whoever saw it a moment ago is told so, and not that it can't be made."""
    with pytest.raises(CheckpointError, match="another quantkit is writing"):
        FolderLock(tmp_path / "out.partial" / "lock")
    assert names_in(tmp_path / "out.partial") == set() and bytes_in(tmp_path / "out.partial") == 0
    (tmp_path / "file").write_text("four")
    assert names_in(tmp_path / "file") == set() and bytes_in(tmp_path) == 4
    assert names_in(tmp_path) == {"file"}


def test_a_folder_that_goes_while_it_is_measured_counts_as_nothing(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("four")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("/a"):
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert bytes_in(tmp_path) == 4


def test_a_folder_that_goes_while_it_is_made_is_another_run_s(tmp_path, monkeypatch):
    """Its run ends between the attempt to make it and the look at what is there."""
    real = Path.mkdir

    def mkdir(path, *arguments, **options):
        if path.suffix == ".partial":
            raise FileExistsError(errno.EEXIST, "File exists")
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(CheckpointError, match="another quantkit is writing"):
        CheckpointWriter(tmp_path / "out", {})
    (tmp_path / "out.partial").write_text("a file")
    with pytest.raises(CheckpointError, match="can't be made"):
        CheckpointWriter(tmp_path / "out", {})


def test_the_space_is_looked_at_by_the_one_writer_alone(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path / "out", {}):
        monkeypatch.setattr("quantkit.checkpoint.durable.bytes_in", lambda folder: pytest.fail("measured"))
        with pytest.raises(CheckpointError, match="another quantkit is writing"):
            CheckpointWriter(tmp_path / "out", {}, needed_bytes=1)
