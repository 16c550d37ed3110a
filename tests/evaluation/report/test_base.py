"""How numbers and names are written."""

import math
from dataclasses import replace

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.base import megabytes, number, short_names, spread, text_name, withheld
from quantkit.evaluation.report.headline import recommended
from quantkit.evaluation.result import names_of
from quantkit.evaluation.speed.machine_load import MachineLoad
from quantkit.plugins.manager import registry


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


def test_megabytes():
    assert [megabytes(n) for n in (None, 134_515_008, 999_600_000, 16_060_000_000)] == [
        "–", "135 MB", "1.00 GB", "16.1 GB"]


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
