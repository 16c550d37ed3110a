"""One comparison from end to end: what runs, against what, what is kept, and what is refused."""

import dataclasses
import shutil

import pytest

from quantkit.evaluation.long.jobs import AnswersJob, TextJob, WindowJob
from quantkit.evaluation.long.run import LongSettings, evaluate_long
from quantkit.kv.spec import parse_kv
from quantkit.support.errors import Stopped, UsageError
from quantkit.testing import tiny_model

KEPT = LongSettings(kv=(parse_kv("snapkv(0.5, window=8)"),), tasks=("needle", "positions", "generated"),
                    lengths=(300,), depths=2, samples=2, prompt=100, new_tokens=20, filler=True, keep=True)
JOBS = (AnswersJob, WindowJob, TextJob)
KV = tuple(parse_kv(kv) for kv in ("int8", "snapkv(0.5, window=8)"))


@pytest.fixture(scope="module")
def found(wide):
    events = []
    settings = LongSettings(kv=KV, lengths=(700, 600), depths=2, samples=2, prompt=100, new_tokens=20,
                            filler=True, seed=1)
    return evaluate_long(str(wide), settings, events.append), events


def test_the_full_cache_runs_first_and_policies_twice(found):
    result, events = found
    assert [one.label for one in result.variants] == [
        "none", "int8", "snapkv(0.5, window=8), known", "snapkv(0.5, window=8), later"]
    assert result.tasks == ["passkey", "needle", "multikey", "variables"]
    for task, questions in (("passkey", 8), ("needle", 8), ("multikey", 8), ("variables", 48)):
        asked = [(one.length, one.context, one.question) for one in result.of(result.variants[0], task)]
        assert len(set(asked)) == len(asked) == questions
        for variant in result.variants[1:]:
            assert [(one.length, one.context, one.question) for one in result.of(variant, task)] == asked
    assert events[-1].done == events[-1].total, "progress counts what is done"


def test_bytes_fall_and_buckets_and_drifts_are_there(found):
    result, _ = found
    none, int8, *snap = result.variants
    for length in (600, 700):
        assert int8.bytes[length] < none.bytes[length] and all(
            one.bytes[length] < 0.7 * none.bytes[length] for one in snap)
    assert {(one.kv, one.low, one.high) for one in result.buckets} == {
        (kv, low, high) for kv in ("none", "int8", "snapkv(0.5, window=8)")
        for low, high in ((100, 600), (600, 699))}
    assert [one.kv for one in result.drifts] == ["none", "int8", "snapkv(0.5, window=8)"]
    assert len(result.drifts[1].differs) == 2


def test_all_questions_are_compared_of_a_task_that_the_full_cache_solves_at_all(found):
    result, _ = found
    solved = [dataclasses.replace(one, right=one.kv == "none" and one.depth == 0.0) for one in result.replies]
    judged = dataclasses.replace(result, replies=solved)
    assert judged.solved() == {(task, length, 0.0, 0) for task in ("passkey", "needle", "multikey")
                               for length in (600, 700)}
    found = judged.paired(judged.variants[1], "needle")
    assert (found.asked, found.full, found.own, found.lost, found.gained) == (8, 4, 0, 4, 0)
    assert judged.paired(judged.variants[1], "variables") is None


@pytest.mark.parametrize(("options", "words"), [
    ({"tasks": ("passky",)}, "passkey"), ({"tasks": ()}, "nothing is to be measured"),
    ({"lengths": (64, 64)}, "given twice"), ({"kv": (KV[0], KV[0])}, "KV setting is given twice"),
    ({"samples": 0}, "at least 1")])
def test_settings_that_make_no_sense_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        LongSettings(**options)


@pytest.mark.parametrize(("options", "words"), [
    ({"lengths": (4096,)}, "longer than the model's context"),
    ({"tasks": ("generated",), "new_tokens": 2000}, "too long"),
    ({"tasks": ("positions",), "prompt": 900, "lengths": (600,)}, "nothing to score")])
def test_what_doesn_t_fit_the_model_is_refused(wide, options, words):
    with pytest.raises(UsageError, match=words):
        evaluate_long(str(wide), LongSettings(**{"lengths": (600,), "filler": True} | options))


def test_a_fingerprint_is_of_what_decides_quality(found):
    protocol = found[0].protocol
    assert dataclasses.replace(protocol, cpu="another").fingerprint == protocol.fingerprint
    assert dataclasses.replace(protocol, seed=2).fingerprint != protocol.fingerprint


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The jobs that are done, in their order, with a store of the test's own; ``stop`` is how many may be."""
    monkeypatch.setattr("quantkit.evaluation.sweep.store.cache_folder", lambda: tmp_path / "cache" / "cpu")
    done, limit = [], {"stop": None}
    for kind in JOBS:
        def measure(job, run, made=kind.measure):
            if len(done) == limit["stop"]:
                raise KeyboardInterrupt
            done.append(job)
            return made(job, run)

        monkeypatch.setattr(kind, "measure", measure)
    return done, limit


def comparable(result):
    data = result.to_dict()
    for drift in data["generated"]:
        assert drift.pop("decode_tok_s") > 0
    return data


@pytest.mark.parametrize("stop", [4, 9, 11], ids=["contexts", "positions", "generated"])
def test_a_stopped_run_goes_on(wide, jobs, stop):
    whole, (done, limit), events = comparable(evaluate_long(str(wide), KEPT)), jobs, []
    total = len(done)
    done.clear()
    limit["stop"] = stop
    with pytest.raises(Stopped):
        evaluate_long(str(wide), dataclasses.replace(KEPT, fresh=True, seed=1))
    limit["stop"] = None
    again = evaluate_long(str(wide), dataclasses.replace(KEPT, seed=1), events.append)
    # positions and generated texts don't depend on the seed: the first run has kept those
    assert len(done) == max(stop, 8) and total == 12
    assert events == [] or events[-1].done == events[-1].total
    assert comparable(again)["positions"] == whole["positions"]
    assert comparable(evaluate_long(str(wide), KEPT)) == whole and len(done) == max(stop, 8)


def test_other_settings_and_another_model_of_the_same_name_are_measured(tmp_path, jobs):
    done, _ = jobs
    folder = tiny_model(tmp_path / "model", head_dim=32, max_position_embeddings=2048)
    evaluate_long(str(folder), KEPT)
    assert len(done) == 12
    evaluate_long(str(folder), dataclasses.replace(KEPT, kv=(parse_kv("int8"),)))
    assert len(done) == 12 + 4 + 4, "the full cache's answers are there"
    shutil.rmtree(folder)
    tiny_model(folder, head_dim=32, max_position_embeddings=2048, seed=1)
    evaluate_long(str(folder), KEPT)
    assert len(done) == 20 + 12
