"""Which registered metrics are measured, and what reports are told about them."""

import subprocess
import sys
import warnings
from dataclasses import fields, replace

import pytest

from quantkit.evaluation.keys import RESERVED_KEYS, reason_against_key
from quantkit.evaluation.metric_table import builtin_infos, reason_of, registered_metrics, task_info
from quantkit.evaluation.metrics import TOP1, Interval
from quantkit.evaluation.result import EvalResult, ModelResult
from quantkit.evaluation.run import EvalSettings, evaluate
from quantkit.plugins import manager as plugins
from quantkit.support.errors import UsageError

MINE = replace(TOP1, name="agreement", title="agrees")


@pytest.fixture
def register(monkeypatch):
    """``register(name, metric)``, as a plugin's."""
    manager = plugins.PluginManager(only=())
    monkeypatch.setattr(plugins, "current", lambda: manager)

    def add(name, metric, owner="quantkit-mine"):
        manager.registries["metrics"].register(name, metric, owner=owner)

    return add


def test_every_key_of_a_row_is_reserved():
    row = ModelResult("m", "bf16", 16.0, 1, metrics={"kl_exact": Interval(0, 0, 0)})
    assert set(row.to_dict()) <= RESERVED_KEYS and {field.name for field in fields(row)} <= RESERVED_KEYS
    assert set(builtin_infos()) <= RESERVED_KEYS


def test_reserved_keys_cost_no_import():
    done = subprocess.run([sys.executable, "-c",
                           "import sys, quantkit.evaluation.keys; print('torch' in sys.modules)"],
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("key", ["", "a/b", "1st", "a b", "ä", "x" * 65, "kl_mean", "intervals", None, "a\n"])
def test_keys_that_no_metric_can_have(key):
    assert reason_against_key(key)


def test_a_plugin_s_metric_is_measured_beside_the_built_ins(register):
    register("mine", MINE)
    register("other", replace(MINE, name="other"), owner="quantkit-other")
    assert [(registered.metric.name, registered.owner) for registered in registered_metrics()] == [
        ("perplexity", "quantkit"), ("kl_mean", "quantkit"), ("top1", "quantkit"),
        ("agreement", "quantkit-mine"), ("other", "quantkit-other")]


@pytest.mark.parametrize(("metric", "reason"), [
    (replace(MINE, name="kl_mean"), "is one of quantkit's"), (replace(MINE, name="kv"), "is one of"),
    (replace(MINE, name="a/b"), "isn't a letter"), (replace(MINE, per="words"), "its per is"),
    (replace(MINE, direction="down"), "its direction is"), (replace(MINE, unit=3), "its unit is"),
    (replace(MINE, title="two\nlines"), "its title is"), (replace(MINE, score=None), "can't be called"),
    ("quantkit_nowhere:METRIC", "nowhere"), (object(), "object")])
def test_what_can_t_be_measured_costs_itself_only(register, metric, reason):
    register("mine", metric)
    with pytest.warns(UserWarning, match=f"mine.*{reason}") as caught:
        names = [registered.metric.name for registered in registered_metrics()]
    assert names == ["perplexity", "kl_mean", "top1"] and len(caught) == 1
    assert "quantkit-mine" in str(caught[0].message)


def test_a_key_that_another_plugin_has(register):
    register("mine", MINE)
    register("other", MINE, owner="quantkit-other")
    with pytest.warns(UserWarning, match="'other' of quantkit-other .* metric of quantkit-mine"):
        assert [registered.owner for registered in registered_metrics()][3:] == ["quantkit-mine"]


def test_tasks_are_described():
    assert task_info("arc_easy/acc").unit == "%" and task_info("arc_easy/acc").direction == "higher"
    assert task_info("gsm8k/exact_match,strict-match").unit == "%", "whatever the filter"
    assert (task_info("wikitext/word_perplexity").unit, task_info("wikitext/word_perplexity").direction) == (
        "", "lower")


def test_results_describe_every_key(register, tiny, int8):
    register("mine", MINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = EvalSettings(window=16, windows=2, speed=False, plot=("agreement", "kl_mean"))
        result = evaluate([str(tiny), str(int8)], settings, command="typed")
    data = result.to_dict()
    assert data["command"] == "typed" and result.plotted == ("agreement", "kl_mean")
    assert data["metrics"]["agreement"] == {"title": "agrees", "unit": "%", "direction": "higher",
                                            "per": "token", "distribution": "quantkit-mine"}
    for row in data["results"]:
        assert row["agreement"] == row["top1"] and set(row["intervals"]) <= set(data["metrics"])


def test_a_plugin_changes_neither_fingerprint_nor_other_numbers(register, tiny):
    settings = EvalSettings(window=16, windows=2, speed=False)
    before = evaluate([str(tiny)], settings).to_dict()
    register("mine", MINE)
    after = evaluate([str(tiny)], settings).to_dict()
    del after["results"][0]["agreement"], after["results"][0]["intervals"]["agreement"]
    del after["metrics"]["agreement"]
    for row in (before["results"][0], after["results"][0]):
        del row["measured"]
    for kept in ("texts", "window_means"):
        for metrics in after["results"][0][kept].values():
            del metrics["agreement"]
    assert after == before


@pytest.mark.parametrize(("plot", "words"), [("kl_maen", "no such metric"),
                                             ("decode_tok_s", "isn't measured"),
                                             ("kl_exact", "--noise-floor only")])
def test_a_plot_of_what_is_not_measured_is_refused_before_any_work(plot, words):
    with pytest.raises(UsageError, match=words) as caught:
        evaluate(["/nowhere"], EvalSettings(speed=False, plot=(plot,)))
    assert "--" in caught.value.next and (plot != "kl_maen" or "did you mean 'kl_mean'" in caught.value.why)


def test_metrics_that_no_table_lists_are_described_too():
    row = ModelResult("m", "bf16", 16.0, 1, metrics={"task/acc": Interval(1, 1, 1)})
    assert list(EvalResult(None, [row]).measured) == ["task/acc"]


@pytest.mark.parametrize(("problem", "reason"), [
    (IndexError("no\nrow"), "IndexError: no row"), (IndexError(), "IndexError"),
    (ValueError("it returns NaN"), "it returns NaN"), (ValueError(), "ValueError"),
    (UsageError("what", why="why", next="next"), "what: why"), ("a \n sentence", "a sentence"),
    (KeyError("x" * 2000), "KeyError: '" + "x" * 289)])
def test_a_cause_is_one_short_line(problem, reason):
    assert reason_of(problem) == reason
