"""The static pictures: the page's charts with every name beside its mark, the same bytes each time."""

import itertools
import re
import struct
from xml.etree import ElementTree

import pytest

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.base import variant_looks
from quantkit.evaluation.report.charts.frontier import frontier_spec
from quantkit.evaluation.report.figure import (
    HEIGHT,
    LETTER,
    TEXT_HEIGHT,
    WIDTH,
    names_layer,
    picture,
    png,
    svg,
)
from quantkit.evaluation.report.frontier import frontiers


def written(document):
    """The texts of a picture, line by line."""
    return [element.text for element in ElementTree.fromstring(document).iter()
            if element.tag.endswith(("}text", "}tspan")) and element.text]


def captions(result):
    return [panel["title"]["text"] for panel in picture(result)["vconcat"]]


def test_both_panels_with_every_name_and_what_they_mean(rich):
    texts = written(svg(rich))
    for text in ("SmolLM2-360M-Instruct: quality, speed and memory",
                 "KL against decode, tok/s (right and down is better)",
                 "KL against weights and KV cache, GB (left and down is better)", "noise floor 0.00110",
                 "KV none", "KV int4", "int8 kv int4"):
        assert text in texts, text
    assert rich.protocol.fingerprint in " ".join(texts)
    assert texts.count("int8 kv int4") == 2, "on the frontier it is named in both"


def test_the_same_bytes_each_time_no_date_and_nothing_loaded(rich):
    document = svg(rich)
    assert svg(rich) == document and png(rich) == png(rich)
    assert not re.search(r"20\d\d-\d\d-\d\d", document) and "href" not in document
    assert set(re.findall(r'font-family="([^"]*)"', document)) == {"sans-serif"}


def test_png_is_wide_enough_to_post(rich):
    content = png(rich)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert 1000 < width < 1400 and 1300 < height < 2000


@pytest.mark.parametrize("number", [0, 1])
def test_names_stand_beside_their_marks_apart_and_inside(rich, number):
    spec = frontier_spec(rich, frontiers(rich)[number], variant_looks(rich.rows))
    boxes = []
    for text in names_layer(spec)["data"]["values"]:
        width = LETTER * len(text["text"])
        left = text["x"] - {"left": 0, "center": width / 2, "right": width}[text["align"]]
        boxes.append((left, text["y"] - TEXT_HEIGHT / 2, left + width, text["y"] + TEXT_HEIGHT / 2))
    assert len(boxes) > 9
    for first, other in itertools.combinations(boxes, 2):
        assert min(first[2], other[2]) <= max(first[0], other[0]) + 1e-6 or (
            min(first[3], other[3]) <= max(first[1], other[1]) + 1e-6)
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= WIDTH + 10 and box[3] <= HEIGHT for box in boxes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["W" * 200, "模型" * 50, "$x^2$ a_b", "_hidden", "", "\x1b[31m",
                                 "<!-- & -->"])
def test_awkward_names(make_result, make_row, name):
    rows = [make_row(name, kl=0.1 * number, mb=100 + number) for number in range(3)]
    for row, kv in zip(rows, ("none", "int8", "$m$")):
        row.kv = kv
    texts = written(svg(make_result(rows)))
    assert max(map(len, texts)) <= 115
    if name.startswith("$x"):
        assert any(name in text for text in texts), "no formula"


def test_metrics_that_are_asked_for_have_panels_against_bytes(make_result):
    result = make_result(plotted=("shift", "top1", "nowhere"))
    result.metrics["shift"] = MetricInfo("shift <x>", "ms", "higher", "run", "quantkit-mine")
    for row, value in zip(result.rows, (-3.0, -1.0, 2.0, 4.0)):
        row.metrics["shift"] = Interval(value, value - 1, value + 1)
    assert captions(result)[2:] == ["shift <x>, ms, higher is better", "top-1, %, higher is better"]
    shift, top1 = (panel["layer"][1]["data"]["values"] for panel in picture(result)["vconcat"][2:])
    assert [row["value"] for row in shift] == [-3.0, -1.0, 2.0, 4.0]
    assert top1[0]["value"] == 100, "in percent"
    assert "shift <x>, ms, higher is better" in written(svg(result))


def test_without_kl_what_is_drawn_by_default_still_is(make_result):
    result = make_result()
    for row in result.rows:
        del row.metrics["kl_mean"]
    assert captions(result) == ["decode, tok/s, higher is better"]


def test_what_cannot_be_drawn_says_so(make_result, make_row):
    assert "nothing was measured that can be drawn" in written(svg(make_result([])))
    assert len(captions(make_result([make_row("only", kl=0)]))) == 2
