"""A comparison in measurements: what is kept isn't done again, and a stopped run goes on."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import weakref

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quantkit.evaluation.metrics import KL
from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.evaluation.run import evaluate
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.suite import SuiteText
from quantkit.evaluation.sweep import models
from quantkit.evaluation.sweep.ahead import look_ahead
from quantkit.evaluation.sweep.models import facts_of
from quantkit.evaluation.sweep.quality import QualityJob
from quantkit.evaluation.tasks.score import wilson
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, Stopped

SETTINGS = EvalSettings(window=32, windows=3, speed=False, keep=True, floor=True, texts=(
    SuiteText(name="prose", text="builtin"), SuiteText(name="german", text="builtin:german", windows=2)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder for measurements alone: kernels stay where all tests have them."""
    monkeypatch.setattr("quantkit.evaluation.sweep.store.cache_folder", lambda: tmp_path / "cache" / "cpu")
    return tmp_path / "cache" / "evaluations"


@pytest.fixture
def work(monkeypatch):
    """The jobs that are done, in their order; ``fails`` is raised before that many were."""
    done = []
    count, measure = {"left": None, "error": None}, QualityJob.measure

    def score(job, run):
        if count["left"] == len(done):
            raise count["error"]
        done.append(job)
        return measure(job, run)

    monkeypatch.setattr(QualityJob, "measure", score)
    return done, count


def plain(result):
    data = result.to_dict()
    for row in data["results"]:
        row.pop("measured")
    return data


def test_what_is_kept_is_not_done_again(tiny, int8, cache, work):
    done, _ = work
    models = [str(tiny), str(int8)]
    first = evaluate(models, SETTINGS)
    assert [(job.model.uri, job.windows) for job in done] == [
        (str(tiny), 3), (str(tiny), 2), (str(int8), 3), (str(int8), 2)]
    again = evaluate(models, SETTINGS)
    assert len(done) == 4 and again.to_dict() == first.to_dict()
    evaluate(models, dataclasses.replace(SETTINGS, window=16))
    assert len(done) == 8, "another window is another measurement"
    evaluate(models, dataclasses.replace(SETTINGS, fresh=True))
    assert len(done) == 12
    evaluate(models, dataclasses.replace(SETTINGS, keep=False))
    assert len(done) == 16


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt(), Stopped),
                                               (QuantkitError("it broke"), QuantkitError)])
def test_a_stopped_run_goes_on(tiny, int8, cache, work, error, raised):
    done, count = work
    models = [str(tiny), str(int8)]
    count.update(left=3, error=error)
    with pytest.raises(raised):
        evaluate(models, SETTINGS)
    assert len(done) == 3 == len(list(cache.iterdir()))
    count["left"] = None
    resumed = evaluate(models, SETTINGS)
    assert len(done) == 4 and (done[-1].model.uri, done[-1].windows) == (str(int8), 2)
    assert plain(resumed) == plain(evaluate(models, dataclasses.replace(SETTINGS, keep=False)))


def test_one_model_is_in_memory_and_the_reference_reads_a_text_once(tiny, int8, int4, cache, monkeypatch):
    alive, loads, reads = [], [], []

    def load_alone(uri, **more):
        gc.collect()
        assert not [layers for layers in alive if layers() is not None]
        loaded = load(uri, **more)
        alive.append(weakref.ref(loaded.model._model.layers[0]))
        loads.append((uri, more["dtype"]))
        return loaded

    class Watched(HiddenStates):
        def __init__(self, runner, *more):
            reads.append(str(runner.dtype))
            super().__init__(runner, *more)

    monkeypatch.setattr(models, "load", load_alone)
    monkeypatch.setattr(models, "HiddenStates", Watched)
    evaluate([str(tiny), str(int8), str(int4)], SETTINGS)
    assert reads == ["torch.float32", "torch.bfloat16"] * 2, "for two texts, whatever the number of variants"
    assert [uri for uri, _ in loads] == [str(tiny)] * 4 + [str(int8), str(int4)]
    assert len(list(cache.iterdir())) == 6, "measurements, and nothing else"


def test_each_text_has_a_row_and_all_together_the_mean(tiny, int8, cache):
    result = evaluate([str(tiny), str(int8)], SETTINGS)
    assert [name for name, *_ in result.protocol.texts] == ["prose", "german"]
    assert result.protocol.windows == 5 and result.protocol.scored == 5 * 31
    row = result.rows[1]
    assert set(row.texts) == {"prose", "german"}
    assert set(row.texts["german"]) >= {"kl_mean", "perplexity", "top1", "kl_p99", "flips"}
    means = [*row.window_means["prose"]["kl_mean"], *row.window_means["german"]["kl_mean"]]
    assert row.metrics["kl_mean"].value == pytest.approx(np.mean(means))
    assert row.metrics["flips"].value == pytest.approx(1 - row.metrics["top1"].value)
    lines = "\n".join(result.protocol.lines())
    assert "text prose: pydoc-topics" in lines and "text german: german" in lines
    only = evaluate([str(tiny), str(int8)], dataclasses.replace(SETTINGS, texts=SETTINGS.texts[:1]))
    assert only.protocol.fingerprint != result.protocol.fingerprint
    assert only.rows[1].metrics["kl_mean"] == KL.summarize(row.window_means["prose"]["kl_mean"])


def test_the_noise_floor_is_of_the_reference_alone(tiny, int8, cache, work):
    result = evaluate([str(tiny), str(int8)], SETTINGS)
    assert set(result.floors) >= {"kl_mean", "kl_median", "kl_p99", "kl_p999", "flips"}
    assert result.noise_floor is not None
    assert result.floors["kl_mean"].value == pytest.approx(result.noise_floor.value, rel=1e-3)
    assert "kl_exact" not in result.rows[1].metrics
    assert evaluate([str(tiny)], dataclasses.replace(SETTINGS, floor=False)).floors == {}


def test_the_noise_floor_of_tasks(tiny, int8, cache, shared_data):
    """The share of items that the reference answers otherwise in float32, by that measurement alone."""
    settings = dataclasses.replace(SETTINGS, tasks=("arc_easy",), task_data=shared_data / "tasks", limit=40)
    result = evaluate([str(tiny), str(int8)], settings)
    rounded = result.rows[0].items["arc_easy/acc"]
    wide = evaluate([str(tiny)], dataclasses.replace(settings, dtype="float32"))
    exact = wide.rows[0].items["arc_easy/acc"]
    changed = sum(first != second for first, second in zip(rounded, exact, strict=True))
    assert result.floors["arc_easy/acc"] == wilson(changed, 40)
    assert "arc_easy/acc" not in wide.floors, "its arithmetic is exact already"


def test_models_times_settings(tiny, int8, cache):
    settings = dataclasses.replace(SETTINGS, kv=(parse_kv("none"), parse_kv("int8")))
    result = evaluate([str(tiny), str(int8)], settings, recipes={str(int8): "tiny-int8"})
    assert [(row.recipe, row.kv) for row in result.rows] == [
        (None, "none"), (None, "int8"), ("tiny-int8", "none"), ("tiny-int8", "int8")]
    assert result.rows[0].metrics["kl_mean"].value == 0 < result.rows[1].metrics["kl_mean"].value
    assert all(row.kv_bytes for row in result.rows)


def test_a_text_token_by_token(tiny, int8, int4, cache):
    result = evaluate([str(tiny), str(int8), str(int4)], SETTINGS)
    assert result.diff.candidate == int8.name, "the closest first"
    diff, = result.other_diffs
    assert diff.text == "prose" and diff.candidate == int4.name
    assert len(diff.tokens) == len(diff.kl) == len(diff.loss) == len(diff.expected) == 31
    flips = sum(pair is not None for pair in diff.expected)
    assert flips == round(31 * result.rows[2].window_means["prose"]["flips"][0])
    assert flips > 0


def test_models_without_files_are_told_apart_by_their_names(cache):
    first, second = (facts_of(f"synthetic:tiny?seed={seed}").identity for seed in (1, 2))
    assert first != second


def test_a_model_that_was_made_anew_is_read_anew(tiny, tmp_path, cache, work):
    _, count = work
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    count.update(left=1, error=QuantkitError("it broke"))
    with pytest.raises(QuantkitError):
        evaluate([str(copy)], SETTINGS)
    count["left"] = None
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.5 if "mlp" in name else tensor for name, tensor in tensors.items()},
              copy / "model.safetensors", metadata={"format": "pt"})
    assert plain(evaluate([str(copy)], SETTINGS)) == plain(
        evaluate([str(copy)], dataclasses.replace(SETTINGS, keep=False)))


def test_the_floor_of_top1_is_near_all(tiny, int4, cache):
    result = evaluate([str(tiny), str(int4)], SETTINGS)
    assert result.floors["top1"].value == pytest.approx(1 - result.floors["flips"].value)
    (top1,) = (test for test in result.rows[1].differences if test.metric == "top1" and test.text == "")
    assert top1.epsilon is not None and top1.epsilon < 0.1 and top1.verdict == "worse"


@pytest.mark.parametrize("settings", [
    dataclasses.replace(SETTINGS, window=4000), dataclasses.replace(SETTINGS, windows=10**6, texts=()),
    dataclasses.replace(SETTINGS, kv=(parse_kv("int4"),))])
def test_what_cannot_be_done_shows_before_anything_is_loaded(tiny, cache, work, settings):
    with pytest.raises(QuantkitError):
        evaluate([str(tiny)], settings)
    assert work[0] == []


def test_without_a_store_an_interrupt_is_plain(tiny, cache, work):
    work[1].update(left=1, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        evaluate([str(tiny)], dataclasses.replace(SETTINGS, keep=False))


def test_what_lies_ahead(tiny, int8, cache, tmp_path):
    recipes = {"int8": tmp_path / "int8", "int4": tmp_path / "int4"}
    ahead = look_ahead([str(tiny)], SETTINGS, recipes)
    assert (ahead.models, ahead.settings, ahead.texts, ahead.measurements, ahead.kept) == (3, 1, 2, 6, 0)
    assert ahead.missing == ("int8", "int4") and ahead.seconds > 0
    assert ahead.sentence() == ("3 variants (3 models × 2 texts), 6 measurements; to quantize: int8, int4")
    evaluate([str(tiny)], SETTINGS)
    later = look_ahead([str(tiny)], SETTINGS, {})
    assert (later.measurements, later.kept, later.seconds) == (2, 2, 0)
