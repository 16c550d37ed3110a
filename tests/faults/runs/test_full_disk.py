"""Real runs on full, forbidden and shared disks: an error that says what is kept, and a run that goes on."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from quantkit.checkpoint import durable
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.testing import tiny_model

GPTQ = {"calibration": {"windows": 4, "window": 16},
        "rules": [{"match": "lm_head", "optional": True},
                  {"match": "*", "method": "gptq",
                   "spec": {"bits": 4, "granularity": {"strategy": "channel"}}}]}


@pytest.fixture
def run(run_from):
    return run_from("gptq on a bad disk", GPTQ)


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(bytes, options)``: the folder of a file system of that size."""
    mounted = []

    def mount(size: int, options: str = "rw") -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "none", str(folder)],
                              capture_output=True, check=False) if shutil.which("mount") else None
        if done is None or done.returncode:
            pytest.skip("this user may not mount a small tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_disk_fails_at_some_points(run, tmp_path, at_step, monkeypatch, code):
    def fail():
        raise OSError(code, os.strerror(code))

    for number in run.points(3):
        out = tmp_path / str(number) / "out"
        at_step(number, fail)
        with pytest.raises(CheckpointError) as caught:
            run(out)
        assert os.strerror(code) in caught.value.why, run.steps[number]
        assert "same command again" in caught.value.next
        monkeypatch.setattr(durable, "step", lambda what: None)
        run.again(out)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_a_limit_on_the_size_of_files(run, tmp_path, in_child, share):
    resource = pytest.importorskip("resource")
    limit = int(share * max(map(len, run.reference.values())))
    out = tmp_path / "out"

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            run(out)
        except CheckpointError as error:
            return 7 if "File too large" in error.why and "kept" in error.why else 8
        return 0

    assert in_child(limited) == 7
    assert not out.exists() and not list(tmp_path.rglob("*.tmp"))
    run.again(out)


def test_a_disk_that_others_fill_meanwhile(run, small_disk, monkeypatch):
    """At every unit: all free space is taken, and given back for the next attempt."""
    disk = small_disk(5 * sum(map(len, run.reference.values())))
    ballast, at = disk / "theirs", 0

    def fill(what: str) -> None:
        nonlocal at
        at -= 1
        if not at:
            with ballast.open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(4096))
                    file.flush()

    points = [n for n, what in enumerate(run.steps) if what.startswith("write ") and "safetensors" in what]
    for number in points[::24]:
        folder = disk / str(number)
        folder.mkdir()
        at = number + 1
        monkeypatch.setattr(durable, "step", fill)
        with pytest.raises(CheckpointError) as caught:
            run(folder / "out")
        assert os.strerror(errno.ENOSPC) in caught.value.why and "kept" in caught.value.why
        assert "free some space" in caught.value.next and not (folder / "out").exists()
        ballast.unlink()
        monkeypatch.setattr(durable, "step", lambda what: None)
        run.again(folder / "out")
        shutil.rmtree(folder)


def test_a_disk_that_is_too_small_is_refused_before_any_work(run, small_disk):
    disk = small_disk(sum(map(len, run.reference.values())) // 2)
    with pytest.raises(CheckpointError, match="doesn't fit on its disk") as caught:
        run(disk / "out")
    assert re.match(r"[\d.]+ (kB|MB) are needed .*, [\d.]+ (kB|MB) are free$", caught.value.why)
    assert not list(disk.iterdir())


def test_a_run_stopped_while_assembling_fits_where_it_fitted(run_by, small_disk, in_child, at_step, kill,
                                                             monkeypatch, tmp_path):
    """What lies there of the checkpoint is made anew, and its space counts as free."""
    model = str(tiny_model(tmp_path / "model", vocab_size=8000))
    run = run_by("a larger checkpoint", lambda out: quantize(model, "int8", out))
    assert run.reference
    disk = small_disk(make_plan(load_recipe("int8"), open_source(model)).needed_disk_bytes + 2**19)
    at_step(run.steps.index("rename quantkit.json"), kill)
    assert in_child(lambda: run(disk / "out")) == -9
    monkeypatch.setattr(durable, "step", lambda what: None)
    run.again(disk / "out")


def test_a_disk_that_is_read_only(run, small_disk):
    disk = small_disk(2**20, "ro")
    with pytest.raises(CheckpointError, match="can't be made") as caught:
        run(disk / "out")
    assert os.strerror(errno.EROFS) in caught.value.why and "choose another --out" in caught.value.next


def test_a_folder_that_is_not_ours(tiny, refused_without_rights, tmp_path):
    quantize(str(tiny), "int8", tmp_path / "out")  # what is imported then needs no rights
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users
        shut = Path(place) / "shut"
        shut.mkdir(mode=0o555)
        model = shutil.copytree(tiny, Path(place) / "model")
        for one in (Path(place), model, *model.iterdir()):
            one.chmod(0o755)
        refused_without_rights(lambda: quantize(str(model), "int8", shut / "out"))
        assert not list(shut.iterdir())
        shut.chmod(0o755)


def test_two_runs_at_once(run, tmp_path):
    """Whichever comes first ends it; the other is turned away, or finds it done."""
    chance = random.Random(5)
    assert run.reference
    for trial in range(3):
        out = tmp_path / str(trial) / "out"
        out.parent.mkdir()
        children = []
        for _ in range(2):
            if (pid := os.fork()) == 0:
                os._exit(_as_a_process(run, out))
            children.append(pid)
            time.sleep(chance.uniform(0, 0.3))
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
        assert codes == [0, 7]
        run.again(out)


def _as_a_process(run, out) -> int:
    try:
        run(out)
    except CheckpointError as error:
        return 7 if "another quantkit is writing" in error.what or "already exists" in error.what else 8
    except QuantkitError:
        return 9
    except BaseException:
        return 10
    return 0
