"""Full, forbidden and shared disks: an error that says what is kept, and a run that can go on."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from pathlib import Path

import pytest

from quantkit.checkpoint import durable
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.support.errors import CheckpointError


@pytest.mark.parametrize("code, remedy", [
    (errno.ENOSPC, "free some space, then run the same command again"),
    (errno.EIO, "run the same command again"), (errno.EROFS, "choose another --out")])
def test_the_disk_fails_at_every_point(run, steps, tmp_path, at_step, reference, contents, monkeypatch, code,
                                       remedy):
    def fail():
        raise OSError(code, os.strerror(code))

    for number, what in enumerate(steps):
        out = tmp_path / str(number) / "out"
        at_step(number, fail)
        with pytest.raises(CheckpointError) as caught:
            run(out)
        assert os.strerror(code) in caught.value.why and remedy in caught.value.next, what
        monkeypatch.setattr(durable, "step", lambda what: None)
        assert not list(out.parent.rglob("*.tmp")) or "rename" in what, "its space is given back"
        over = out.exists() and not (out.with_name("out.partial") / "state.json").exists()
        try:
            run(out)
            assert not over, what
        except CheckpointError as error:
            assert over and "already exists" in str(error), what
        assert contents(out) == reference


@pytest.mark.parametrize("limit", [1000, 4000, 12_000])
def test_a_file_size_limit_stops_the_run_and_the_next_one_ends_it(run, tmp_path, in_child, reference,
                                                                  contents, limit):
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            run(out)
        except CheckpointError as error:
            return 7 if "File too large" in error.why and "kept" in error.why else 8
        return 0

    assert max(len(raw) for raw in reference.values()) > limit
    assert in_child(limited) == 7
    assert not out.exists() and not list(tmp_path.rglob("*.tmp"))
    assert contents(run(out)) == reference


def test_a_second_writer_is_turned_away_and_let_in_later(run, tmp_path, reference, contents):
    out = tmp_path / "out"
    with CheckpointWriter(out, {"run": 1}), \
            pytest.raises(CheckpointError, match="another quantkit is writing"):
        CheckpointWriter(out, {"run": 1})
    assert contents(run(out)) == reference


def test_a_second_process_is_turned_away_until_the_first_dies(run, tmp_path, reference, contents):
    out = tmp_path / "out"
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        holder = CheckpointWriter(out, {"run": 1})
        os.write(tell, b"x")
        signal.pause()
        holder.close()
    os.read(ready, 1)
    try:
        with pytest.raises(CheckpointError, match="another quantkit is writing"):
            run(out)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert contents(run(out)) == reference


def test_a_lock_whose_folder_was_removed_is_no_lock(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    path = tmp_path / "x" / "lock"
    taken = durable._lock

    def finish_first(file):
        path.unlink()  # the other writer cleans up between our open and our lock
        taken(file)

    monkeypatch.setattr(durable, "_lock", finish_first)
    with pytest.raises(CheckpointError, match="another quantkit"):
        durable.FolderLock(path)


def test_a_folder_that_may_not_be_written(refused_without_rights):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        shut = Path(folder)
        shut.chmod(0o555)
        refused_without_rights(lambda: CheckpointWriter(shut / "out", {}))
        assert not list(shut.iterdir())
        shut.chmod(0o755)


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="can't be made") as caught:
        CheckpointWriter(tmp_path / "file" / "out", {})
    assert "choose another --out" in caught.value.next
    assert (tmp_path / "file").read_text() == "mine"


def in_the_way(folder: Path) -> None:
    (folder / "out.partial").write_text("mine")


def a_loop(folder: Path) -> None:
    (folder / "out.partial").symlink_to("out.partial")


@pytest.mark.parametrize("name, make", [
    ("out", in_the_way), ("out", a_loop), ("x" * 250, lambda folder: None), ("x" * 300, lambda folder: None)])
def test_what_no_other_attempt_would_change(tmp_path, name, make):
    make(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="can't be") as caught:
        CheckpointWriter(tmp_path / name, {})
    assert caught.value.next.startswith("choose another --out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_system_that_is_not_for_files():
    if not os.path.isdir("/proc/self"):  # noqa: PTH112
        pytest.skip("needs /proc")
    with pytest.raises(CheckpointError, match="can't be made") as caught:
        CheckpointWriter("/proc/quantkit/out", {})
    assert "choose another --out" in caught.value.next
