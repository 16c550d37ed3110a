"""Two variants pair by pair, and what that allows to say."""

import math

import numpy as np
import pytest

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.paired import EPSILONS, AnswerPair, differences, epsilon_of, of_answers, ratio
from quantkit.evaluation.paired_statistics import mcnemar, newcombe
from quantkit.evaluation.result import ModelResult

RANDOM = np.random.default_rng(0)
PROSE, CODE = RANDOM.normal(3.4, 0.3, 30), RANDOM.normal(1.2, 0.2, 12)


def row(windows=None, items=None):
    return ModelResult("m", "bf16", 16.0, 100, window_means=windows or {}, items=items or {})


def compared(before, after, **options):
    return {(difference.metric, difference.text): difference
            for difference in differences(before, after, **options)}


def test_each_text_and_all_of_them():
    before = row({"prose": {"perplexity": list(PROSE)}, "code": {"perplexity": list(CODE)}})
    after = row({"prose": {"perplexity": list(PROSE + RANDOM.normal(0.05, 0.02, 30))},
                 "code": {"perplexity": list(CODE + RANDOM.normal(-0.05, 0.01, 12))}})
    table = compared(before, after)
    assert list(table) == [("perplexity", "prose"), ("perplexity", "code"), ("perplexity", "")]
    prose, code, pooled = table.values()
    assert (prose.verdict, code.verdict) == ("worse", "better")
    assert prose.low < 0.05 < prose.high and code.low < -0.05 < code.high
    assert prose.p < 0.001 and prose.test == "sign flips over windows" and pooled.items == 42
    assert pooled.difference == pytest.approx((30 * prose.difference + 12 * code.difference) / 42)
    single = compared(*[row({"prose": {"perplexity": list(PROSE)}})] * 2)
    assert list(single) == [("perplexity", "")]


@pytest.mark.parametrize(("shift", "noise", "verdict"), [
    (0.0, 0.001, "indistinguishable"), (0.004, 0.0005, "indistinguishable"), (0.02, 0.005, "worse"),
    (-0.02, 0.005, "better"), (0.0, 0.2, "undecided")])
def test_what_may_be_said_of_perplexity(shift, noise, verdict):
    change = np.random.default_rng(4).normal(0, noise, 30)
    after = row({"t": {"perplexity": list(PROSE + shift + change - change.mean())}})
    outcome = compared(row({"t": {"perplexity": list(PROSE)}}), after)["perplexity", ""]
    assert outcome.verdict == verdict and outcome.epsilon == 0.005
    assert outcome.difference == pytest.approx(shift, abs=1e-12)


def test_equivalence_is_rarely_claimed_of_what_differs_by_epsilon():
    random, claimed = np.random.default_rng(9), 0
    for run in range(300):
        after = row({"t": {"perplexity": list(PROSE + random.normal(0.005, 0.01, 30))}})
        claimed += compared(row({"t": {"perplexity": list(PROSE)}}), after, seed=run)[
            "perplexity", ""].verdict == "indistinguishable"
    assert claimed / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_a_distance_is_compared_with_the_noise_and_not_with_nothing():
    kl = np.abs(np.random.default_rng(1).normal(0.002, 0.0002, 20))
    reference = row({"t": {"kl_mean": [0.0] * 20, "top1": [1.0] * 20}})
    candidate = row({"t": {"kl_mean": list(kl), "top1": list(1 - 20 * kl), "flips": list(20 * kl)}})
    table = compared(reference, candidate)
    assert table["kl_mean", ""].verdict == "worse" and table["kl_mean", ""].p < 0.01
    assert "one-sided" in table["kl_mean", ""].test
    floor = {"kl_mean": Interval(0.003, 0.0029, 0.0031)}
    noise = compared(reference, candidate, floors=floor)["kl_mean", ""]
    assert noise.verdict == "indistinguishable" and noise.epsilon == 0.003 and noise.p > 0.99
    chosen = compared(reference, candidate, floors=floor, epsilons={"kl_mean": 0.0015})["kl_mean", ""]
    assert chosen.verdict == "worse" and chosen.epsilon == 0.0015
    # 4% of the tokens flip, which is more than the 1% that count as none
    assert table["top1", ""].verdict == table["flips", ""].verdict == "worse"
    assert table["top1", ""].difference == pytest.approx(-table["flips", ""].difference)


def test_right_and_wrong_answers():
    before = [1.0] * 60 + [0.0] * 40
    after = [1.0] * 50 + [0.0] * 10 + [1.0] * 2 + [0.0] * 38
    outcome = compared(row(items={"arc/acc": before}), row(items={"arc/acc": after}))["arc/acc", ""]
    assert (outcome.low, outcome.high) == newcombe(50, 10, 2, 38) and outcome.p == mcnemar(10, 2)
    assert outcome.difference == pytest.approx(-0.08) and outcome.verdict == "worse" and outcome.items == 100
    alike = compared(row(items={"arc/acc": before * 10}), row(items={"arc/acc": before * 10}))["arc/acc", ""]
    assert alike.verdict == "indistinguishable" and alike.p == 1.0
    few = compared(*[row(items={"arc/acc": before[50:70]})] * 2)["arc/acc", ""]
    assert few.verdict == "undecided", "twenty equal answers prove no equality within a point"


def test_log_likelihoods_of_items():
    values = np.random.default_rng(6).normal(-20, 5, 50)
    outcome = compared(row(items={"lambada/perplexity": list(values)}),
                     row(items={"lambada/perplexity": list(values - 1)}))["lambada/perplexity", ""]
    assert outcome.difference == pytest.approx(-1) and outcome.verdict == "worse"
    assert outcome.test == "sign flips over items" and outcome.epsilon is None


def test_what_has_no_pairs_is_left_out():
    before = row({"t": {"perplexity": [1.0, 2.0]}}, {"a/acc": [1.0, 0.0]})
    after = row({"t": {"perplexity": [1.0, 2.0, 3.0], "mine": [1.0]}, "u": {"kl_mean": [math.inf, 1.0]}},
                {"a/acc": [1.0], "b/acc": [1.0], "c/acc": []})
    assert differences(before, after) == []
    alone = compared(before, row({"t": {"kl_mean": [0.5]}}))["kl_mean", ""]
    assert (alone.low, alone.high, alone.p, alone.verdict) == (0.5, 0.5, None, "undecided")


def test_epsilons_by_key_task_and_floor():
    floors = {"top1": Interval(0.97, 0.96, 0.98), "kl_mean": Interval(math.nan, 0, 1)}
    assert epsilon_of("arc/acc", None, {"arc": 0.02}, share=True) == 0.02
    assert epsilon_of("arc/acc", None, None, share=True) == 0.01
    assert epsilon_of("top1", floors, None) == pytest.approx(0.03)
    assert epsilon_of("kl_mean", floors, None) == EPSILONS["kl_mean"]
    assert epsilon_of("mine", floors, None) is None


def test_a_plugin_s_direction():
    infos = {"mine": MetricInfo("mine", direction="higher", owner="quantkit-other")}
    rows = [row({"t": {"mine": list(values)}}) for values in (PROSE, PROSE + 1)]
    assert compared(*rows, infos=infos)["mine", ""].verdict == "better"
    assert compared(*rows)["mine", ""].verdict == "undecided"


def test_a_ratio_of_speeds_has_the_widest_range():
    outcome = ratio(Interval(10, 8, 12), Interval(20, 18, 24))
    assert (outcome.value, outcome.low, outcome.high) == (2, 1.5, 3)
    assert math.isnan(ratio(Interval(0, 0, 0), Interval(1, 1, 1)).value)


def test_answers_are_counted_by_question_and_changes_by_context():
    answers = of_answers([AnswerPair(0, True, False, -3.0), AnswerPair(0, True, True, -1.0),
                          AnswerPair(1, False, True, 1.0), AnswerPair(1, False, False, 0.0),
                          AnswerPair(2, True, False, -4.0)])
    assert (answers.asked, answers.full, answers.own, answers.lost, answers.gained) == (5, 3, 2, 2, 1)
    assert answers.change.value == pytest.approx((-2.0 + 0.5 - 4.0) / 3), "contexts weigh alike"
    once, often = (of_answers([AnswerPair(context, True, True, change)
                               for context, change in enumerate((-1.0, 0.0, 2.0)) for _ in range(times)])
                   for times in (1, 50))
    assert often.change == once.change, "questions about one context don't narrow the interval"
