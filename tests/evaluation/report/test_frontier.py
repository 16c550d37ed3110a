"""Which variants no other beats, and where a KL of zero stands."""


import math
from dataclasses import replace

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.base import number, short_names, spread, text_name, withheld
from quantkit.evaluation.report.frontier import dominated_rows, frontiers, quality_floor
from quantkit.evaluation.report.headline import recommended
from quantkit.evaluation.result import names_of
from quantkit.evaluation.speed.machine_load import MachineLoad
from quantkit.plugins.manager import registry


def point(value):
    return Interval(value, value, value)


@pytest.fixture
def compared(make_row, make_result):
    """``compared((kl, tok/s, mb), …)``"""

    def make(*values, **extra):
        rows = [make_row(f"v{number}", kl=kl, decode=decode, mb=mb)
                for number, (kl, decode, mb) in enumerate(values)]
        return make_result(rows, **extra)

    return make


def test_dominated_is_what_another_beats_in_both(compared):
    speed, size = frontiers(compared((0, 10, 400), (0.1, 30, 100), (0.2, 20, 90), (0.2, 40, 120)))
    assert [entry.dominated for entry in speed.points] == [False, False, True, False]
    assert [entry.dominated for entry in size.points] == [False, False, False, True]
    assert [entry.index for entry in speed.line] == [0, 1, 3], "by speed"
    assert [entry.index for entry in size.line] == [2, 1, 0], "by bytes"
    assert speed.higher and not size.higher


def test_equal_variants_do_not_beat_each_other_but_half_better_ones_do(compared):
    speed, _ = frontiers(compared((0, 10, 1), (0.1, 20, 1), (0.1, 20, 1), (0.1, 19, 1), (0.2, 20, 1)))
    assert [entry.dominated for entry in speed.points] == [False, False, False, True, True]


def test_a_row_is_grey_only_if_it_is_on_no_frontier(compared):
    result = compared((0, 10, 400), (0.1, 30, 100), (0.2, 20, 90), (0.3, 25, 95))
    assert dominated_rows(result) == {3}


def test_what_has_no_value_has_no_point(compared, make_row, make_result):
    result = compared((0, 10, 400), (0.1, 30, 100), (0.2, 20, 90))
    del result.rows[1].metrics["decode_tok_s"]
    result.rows[2].metrics["kl_mean"] = Interval(math.nan, 0.0, math.inf)
    speed, size = frontiers(result)
    assert [entry.index for entry in speed.points] == [0]
    assert [entry.index for entry in size.points] == [0, 1]
    assert [picture.key for picture in frontiers(make_result([make_row("one", prefill=None)]))] == ["bytes"]
    assert frontiers(make_result([])) == []


def test_the_cache_counts(compared):
    result = compared((0, 10, 400), (0.1, 30, 400))
    assert frontiers(result)[1].title == "weights, GB"
    result.rows[0].kv_bytes = 100_000_000
    _, size = frontiers(result)
    assert size.title == "weights and KV cache, GB"
    assert [entry.cost.value for entry in size.points] == [0.5, 0.4]


def test_the_floor_is_the_noise_or_half_the_smallest(compared):
    result = compared((0, 10, 400), (0.1, 30, 100), (0.02, 30, 100))
    floor = quality_floor(result)
    assert floor.value == 0.01 and floor.noise is None and floor.at_least(0) == 0.01
    assert floor.name == "KL 0" and "has no zero" in floor.sentence
    result.rows[0].metrics["kl_exact"] = Interval(0.003, 0.002, 0.004)
    assert quality_floor(result).value == 0.003
    result.floors["kl_mean"] = Interval(0.0011, 0.001, 0.0013)
    floor = quality_floor(result)
    assert floor.noise == result.floors["kl_mean"] and floor.at_least(0.0005) == 0.0011
    assert floor.name == "noise floor 0.00110" and "0.00110 nats" in floor.sentence
    assert quality_floor(compared((0, 10, 400))).value > 0, "nothing but zeros"


def test_all_of_the_sample(rich):
    speed, size = frontiers(rich)
    assert len(speed.points) == len(size.points) == 15
    assert {rich.rows[index].model for index in dominated_rows(rich)} == {
        "HuggingFaceTB/SmolLM2-360M-Instruct", "out/nf4"}
    for picture in (speed, size):
        qualities = [entry.quality.value for entry in picture.line]
        assert qualities == sorted(qualities, reverse=not picture.higher), "a stair"


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (0, "0"), (28.7123, "28.7"), (0.0031249, "0.00312"), (9.999, "10.0"), (99.96, "100"),
    (12345.6, "12346"), (0.000012345, "1.23e-5"), (1.5e9, "1.50e9"), (-0.5, "-0.500"),
    (math.inf, "∞"), (math.nan, "–")])
def test_number(value, text):
    assert number(value) == text


def test_spread():
    assert spread(Interval(28.71, 27.5, 30.04)) == ("28.7", "27.5–30.0")
    assert spread(Interval(0.78, 0.77, 0.79), percent=True) == ("78.0%", "77.0–79.0")
    assert spread(Interval(0.0, 0.0, 0.0)) == ("0", ""), "nothing to say about a point"
    assert spread(None) == ("–", "")
    assert spread(Interval(-1.5, -2.0, -1.0)) == ("-1.50", "-2.00 to -1.00")


def test_names_are_as_short_as_they_can_be_told_apart(make_row):
    rows = [make_row(n) for n in ("a/run/int4", "b/run/int4", "c/int8", "smollm2", "hf/odd\nname")]
    assert short_names(rows) == ["a/run/int4", "b/run/int4", "int8", "smollm2", "odd name"]
    assert short_names([make_row("int4"), make_row("x/int4")]) == ["int4", "x/int4"]
    peers = [make_row("base", "bf16"), *(replace(make_row("base", method), tool=tool) for method, tool in (
        ("bf16", "transformers 5.23.0"), ("bitsandbytes nf4", "transformers 5.23.0, bitsandbytes 0.50.2"),
        ("BF16", "llama.cpp 0.6.0")))]
    assert short_names(peers) == ["base", "transformers base bf16", "transformers base bitsandbytes nf4",
                                  "llama.cpp base"]
    assert names_of(peers[0], "base") == {"base"}
    assert names_of(peers[3], "llama.cpp base") == {"llama.cpp base"}
    assert short_names([make_row("a\x1b[31m")]) == ["a?[31m"], "harmless in a terminal, and XML"


def test_texts_are_called_by_what_they_are():
    assert text_name("pydoc-topics-3.11") == "Python docs 3.11" and text_name("prose") == "prose"


def test_why_a_speed_is_missing_is_said_in_every_report(rich):
    for row in rich.rows[3:5]:
        row.speed = row.speed.model_copy(update={"load": MachineLoad(stolen=0.0, others=0.6)})
        row.speed = row.speed.without_speed("another reason")
        for key in ("decode_tok_s", "prefill_tok_s"):
            del row.metrics[key]
    sentence, = withheld(rich)
    assert sentence.startswith("No speed of int8 kv none, int8 kv int8: the machine was busy: up to 60%")
    for name in ("table", "markdown", "html"):
        text = registry("reporters").get(name).render(rich)
        assert "No speed of int8 kv none" in " ".join(text.split())
    assert not any("fast" in fact for _, fact in recommended(rich).facts if recommended(rich).index in (3, 4))
