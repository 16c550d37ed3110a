"""What is finished stays: a comparison that was stopped ends as one that wasn't."""

import dataclasses
import os
import shutil

import pytest

from quantkit.evaluation.long import generated, positions
from quantkit.evaluation.long.answer import LongContextModel
from quantkit.evaluation.long.journal import FILE, Journal, forget
from quantkit.evaluation.long.run import LongSettings, evaluate_long
from quantkit.kv.spec import parse_kv
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

KEY = {"model": "one"}
SETTINGS = LongSettings(kv=(parse_kv("snapkv(0.5, window=8)"),), tasks=("needle", "positions", "generated"),
                        lengths=(300,), depths=2, samples=2, prompt=100, new_tokens=20, filler=True)


def refused():
    raise AssertionError("this was done before")


def test_pieces_stay_with_their_numbers_exact(tmp_path):
    kept = Journal(tmp_path / "new", KEY)
    made = {"a": [0.1, 1e-300, float("inf")], "b": None, "c": "ü\n"}
    assert kept.piece("first", lambda: made) == made and kept.piece("first", refused) == made
    kept.close()
    again = Journal(tmp_path / "new", KEY)
    assert again.has("first") and not again.has("second")
    assert again.piece("first", refused) == made
    again.close()
    forget(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_line_that_was_cut_short_is_done_again(tmp_path, cut):
    kept = Journal(tmp_path, KEY)
    for name in ("first", "second"):
        kept.piece(name, lambda: [1])
    kept.close()
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-cut])
    again = Journal(tmp_path, KEY)
    assert again.has("first") and not again.has("second")
    again.piece("second", lambda: [1])
    again.close()
    assert (tmp_path / FILE).read_bytes() == whole


def test_even_the_first_line_may_be_cut_short(tmp_path):
    (tmp_path / FILE).write_text('{"key": "12')
    Journal(tmp_path, KEY).close()
    Journal(tmp_path, KEY).close()
    assert (tmp_path / FILE).read_text().count("\n") == 1


def test_another_comparison_and_other_files_are_refused_and_stay(tmp_path):
    Journal(tmp_path, KEY).close()
    with pytest.raises(UsageError, match="unfinished comparison of another kind"):
        Journal(tmp_path, {"model": "two"})
    for content in ("no json\n", "[]\n", '{"other": 1}\n', "\xff\n", "a note without an end"):
        (tmp_path / FILE).write_text(content, encoding="latin-1")
        with pytest.raises(QuantkitError, match="line 1 is damaged"):
            Journal(tmp_path, KEY)
        assert (tmp_path / FILE).read_text(encoding="latin-1") == content


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Journal(None, KEY)
    assert kept.piece("first", lambda: 1) == 1
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_what_can_t_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantkitError, match="can't be written"):
        Journal(tmp_path / "file", KEY)


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path, monkeypatch):
    kept = Journal(tmp_path, KEY)
    kept.piece("first", lambda: [1])

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(QuantkitError, match="can't be written") as found:
            kept.piece("second", lambda: [2])
    assert "No space left" in found.value.why and "goes on" in found.value.next
    kept.close()
    assert Journal(tmp_path, KEY).has("first")


def test_a_second_process_is_refused(tmp_path):
    kept = Journal(tmp_path, KEY)
    with pytest.raises(QuantkitError, match="another quantkit"):
        Journal(tmp_path, KEY)
    kept.close()
    Journal(tmp_path, KEY).close()


def comparable(result):
    found = result.to_dict()
    for one in found["generated"]:
        assert one.pop("decode_tok_s") > 0
    return found


@pytest.mark.parametrize(("where", "what", "calls", "left"), [
    (LongContextModel, "read", 8, 4), (positions, "_window", 2, 1), (generated, "_text", 2, 1)],
    ids=["contexts", "positions", "generated"])
def test_a_stopped_run_goes_on(wide, tmp_path, monkeypatch, where, what, calls, left):
    whole, made, done = comparable(evaluate_long(str(wide), SETTINGS)), getattr(where, what), []

    def stopping(*given):
        if len(done) == calls - left:
            raise KeyboardInterrupt
        done.append(1)
        return made(*given)

    monkeypatch.setattr(where, what, stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_long(str(wide), SETTINGS, folder=tmp_path)
    events, again = [], []
    monkeypatch.setattr(where, what, lambda *given: again.append(1) or made(*given))
    assert comparable(evaluate_long(str(wide), SETTINGS, events.append, tmp_path)) == whole
    assert len(again) == left, "what was done isn't done again"
    assert events[-1].done == events[-1].total, "and counts as done"


def test_other_settings_don_t_go_on(wide, tmp_path):
    evaluate_long(str(wide), SETTINGS, folder=tmp_path)
    with pytest.raises(UsageError, match="another kind"):
        evaluate_long(str(wide), dataclasses.replace(SETTINGS, seed=1), folder=tmp_path)
    with pytest.raises(UsageError, match="another kind"):
        evaluate_long(str(wide), dataclasses.replace(SETTINGS, kv=(parse_kv("int8"),)), folder=tmp_path)


def test_another_model_of_the_same_name_doesn_t_go_on(tmp_path):
    folder = tiny_model(tmp_path / "model", head_dim=32, max_position_embeddings=2048)
    evaluate_long(str(folder), SETTINGS, folder=tmp_path)
    shutil.rmtree(folder)
    tiny_model(folder, head_dim=32, max_position_embeddings=2048, seed=1)
    with pytest.raises(UsageError, match="another kind"):
        evaluate_long(str(folder), SETTINGS, folder=tmp_path)
