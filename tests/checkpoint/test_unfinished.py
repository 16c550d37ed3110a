"""What isn't finished: the error says what makes it, whether that still runs, and how to go on."""

import shutil

import pytest

from quantkit.checkpoint import durable
from quantkit.checkpoint.durable import FolderLock, is_locked
from quantkit.checkpoint.open import open_checkpoint, open_model
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, SourceError, Stopped
from quantkit.testing import tiny_model


@pytest.fixture
def stopped(tmp_path):
    """OUT, whose run was stopped before its second layer."""
    def stop(event):
        if event.label == "layer 1":
            raise KeyboardInterrupt

    model = tiny_model(tmp_path / "source")
    with pytest.raises(Stopped):
        quantize(str(model), "int8", tmp_path / "my out", progress=stop)
    return tmp_path / "my out"


@pytest.mark.parametrize("use", [lambda out: load(str(out)), lambda out: open_model(str(out)),
                                 open_checkpoint, verify])
def test_a_run_that_stopped(stopped, use):
    with pytest.raises(CheckpointError) as caught:
        use(stopped)
    assert caught.value.what == f"{stopped} isn't finished"
    assert caught.value.why == ("the run that was writing it stopped, of source by recipe int8: "
                                f"2 finished units are kept in {stopped}.partial")
    assert f"quantkit quantize source … --out '{stopped}'" in caught.value.next


def test_a_run_that_goes_on(stopped):
    lock = FolderLock(stopped.with_name("my out.partial") / "lock")
    try:
        with pytest.raises(CheckpointError, match="isn't finished") as caught:
            load(str(stopped))
    finally:
        lock.release()
    assert "is writing it now, of source by recipe int8" in caught.value.why
    assert caught.value.next == "wait for the run to end"


def test_asking_keeps_nobody_out(stopped):
    path = stopped.with_name("my out.partial") / "lock"
    assert not is_locked(path)
    lock = FolderLock(path)
    assert is_locked(path) and is_locked(path)
    lock.release()
    assert not is_locked(path)
    assert not is_locked(path.with_name("none")) and not path.with_name("none").exists()


def test_a_writer_that_comes_while_somebody_asks_is_let_in(stopped, monkeypatch):
    path, asking = stopped.with_name("my out.partial") / "lock", []
    asking.append(FolderLock(path))  # as is_locked holds it
    monkeypatch.setattr(durable.time, "sleep", lambda seconds: asking.pop().release())
    FolderLock(path).release()
    assert not asking


def test_a_writer_that_comes_while_another_writes_is_turned_away(stopped):
    path = stopped.with_name("my out.partial") / "lock"
    lock = FolderLock(path)
    with pytest.raises(CheckpointError, match="another quantkit is writing"):
        FolderLock(path)
    lock.release()


def test_the_runs_own_folder_says_the_same(stopped):
    partial = stopped.with_name("my out.partial")
    with pytest.raises(CheckpointError, match="is an unfinished checkpoint") as caught:
        open_model(str(partial))
    assert f"--out '{stopped}'" in caught.value.next


def test_a_state_that_nobody_can_read_is_an_unfinished_run_all_the_same(stopped):
    (stopped.with_name("my out.partial") / "state.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        load(str(stopped))
    assert "quantkit quantize SOURCE …" in caught.value.next


def test_a_folder_that_is_no_runs_changes_nothing(stopped, tmp_path):
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(SourceError):
        open_model(str(tmp_path / "other"))


def test_what_is_there_is_read_whatever_lies_beside_it(stopped):
    tiny_model(stopped)
    open_model(str(stopped)).close()


def test_a_packages_model_is_not_mistaken_for_a_run_of_its_name(stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped.with_name("my out.partial"), tmp_path / "synthetic:llama-8b?layers=1.partial")
    open_model("synthetic:llama-8b?layers=1").close()
