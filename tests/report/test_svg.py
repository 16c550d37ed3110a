"""The plot: well-formed, and everything in it can be seen."""

import math
import re
from xml.etree import ElementTree

import pytest

from quantkit.evaluate.metrics import Interval
from quantkit.report.svg import HEIGHT, WIDTH, render
from quantkit.report.svg_labels import LINE, LabelBox, place, reach

SVG = "{http://www.w3.org/2000/svg}"


def texts(root):
    return [node for node in root.iter(f"{SVG}text") if node.get("class") == "label"]


def box(node):
    x, y, wide = float(node.get("x")), float(node.get("y")) - 5, reach(node.text)
    left = {"start": x, "end": x - wide, "middle": x - wide / 2}[node.get("text-anchor", "start")]
    return LabelBox(left, y - LINE / 2, left + wide, y + LINE / 2)


def check(svg):
    """Parses it; every text is inside, no label is on another."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    for node in root.iter(f"{SVG}text"):
        if node.get("class") in ("label", "tick"):
            found = box(node)
            assert found.left >= 0 and found.right <= width + 4, node.text
        assert 0 < float(node.get("y")) < height
    boxes = [box(node) for node in texts(root)]
    for i, one in enumerate(boxes):
        assert all(one.meets(other) < 1 for other in boxes[:i])
    return root


def test_typical_result(make_result):
    root = check(render(make_result()))
    labels = [node.text for node in texts(root)]
    assert sorted(labels) == sorted(["smollm2 0", "int8 0.00400", "int4 0.250", "nf4 0.270",
                                     "smollm2 30.0", "int8 45.0", "int4 25.0", "nf4 4.00"])
    assert len(list(root.iter(f"{SVG}circle"))) == 8


def test_marks_stand_where_the_numbers_say(make_result):
    root = check(render(make_result()))
    kl, speed = (list(root.iter(f"{SVG}circle"))[i:i + 4] for i in (0, 4))
    x, y = ([float(node.get(key)) for node in kl] for key in ("cx", "cy"))
    assert x[2] < x[3] < x[1] < x[0], "by file size"
    assert y[3] < y[2] < y[1] < y[0], "more KL is higher"
    floor, unit = y[0], (y[0] - y[2]) / math.sqrt(0.25)
    assert floor - y[3] == pytest.approx(unit * math.sqrt(0.27), abs=0.2), "by the square root"
    y = [float(node.get("cy")) for node in speed]
    assert (y[0] - y[1]) / (45 - 30) == pytest.approx((y[3] - y[0]) / (30 - 4), abs=0.02), "linear"
    assert all(HEIGHT < value < 2 * HEIGHT for value in y)


def test_names_are_escaped(make_result, make_row):
    root = check(render(make_result([make_row('a<b>&"c"]]>'), make_row("<script>alert(1)</script>")])))
    assert any(node.text.startswith('a<b>&"c"') for node in texts(root))
    assert not list(root.iter(f"{SVG}script"))


@pytest.mark.parametrize("name", ["W" * 200, "w" * 200, "模型" * 50, "a" * 200])
def test_long_names_are_cut(make_result, make_row, name):
    root = check(render(make_result([make_row(name, mb=mb, kl=0.1) for mb in (10, 150, 290)])))
    assert all("…" in node.text and reach(node.text) < WIDTH for node in texts(root))


def test_eight_models_at_one_place(make_result, make_row):
    check(render(make_result([make_row(f"model-{i}", mb=290, kl=0.3) for i in range(8)])))


def test_quality_alone_makes_one_panel(make_result, make_row):
    root = check(render(make_result([make_row("one", prefill=None), make_row("two", prefill=None)])))
    assert root.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    assert len(list(root.iter(f"{SVG}circle"))) == 2


def product(make_row, models, settings):
    rows = [make_row(model, mb=100 + 50 * i, kl=0.1) for i, model in enumerate(models) for _ in settings]
    for row, kv in zip(rows, settings * len(models)):
        row.kv = kv
    return rows


@pytest.mark.parametrize("settings", [["none", "int8"],
                                      ["none", "window(512, sinks=4)+int8", "snapkv(0.5)", "tova(0.25)+int4",
                                       "int8", "int4", "bf16"]])
def test_a_product_has_a_legend_instead_of_names(make_result, make_row, settings):
    root = check(render(make_result(product(make_row, ["smollm2", "W" * 60, "x/int4"], settings))))
    labels = [node.text for node in texts(root)]
    assert labels[0] == "smollm2" and labels[2:] == ["int4", *(f"kv {kv}" for kv in settings)]
    marks = [node for node in root.iter() if node.get("class") == "mark"]
    key, drawn = marks[:len(labels)], marks[len(labels):]
    assert len(drawn) == 2 * 3 * len(settings)
    looks = [(node.get("fill"), node.get("d")) for node in drawn[:len(drawn) // 2]]
    assert [fill for fill, _ in looks] == [node.get("fill") for node in key[:3] for _ in settings]
    assert [shape for _, shape in looks] == [node.get("d") for node in key[3:]] * 3
    assert len({node.get("d") for node in key[3:]}) == min(len(settings), 6)


def test_one_model_with_many_settings_has_names(make_result, make_row):
    root = check(render(make_result(product(make_row, ["smollm2"], ["none", "int8", "int4"]))))
    assert [node.text for node in texts(root)][:3] == [f"smollm2 kv {kv} 0.100" for kv in
                                                      ("none", "int8", "int4")]


def test_what_is_not_finite_is_left_out(make_result, make_row):
    ruined = make_row("ruined")
    ruined.metrics["kl_mean"] = Interval(math.inf, 1.0, math.inf)
    svg = render(make_result([make_row("fine"), ruined]))
    check(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)
    check(render(make_result([ruined])))
    check(render(make_result([])))


def test_all_zero(make_result, make_row):
    check(render(make_result([make_row("only", kl=0)])))


def test_places_are_near_their_marks():
    inside = LabelBox(0, 0, 500, 300)
    one, = place([(100, 150)], ["alone"], 6, inside)
    assert (one.anchor, one.moved) == ("start", False) and 100 < one.x < 120 and 145 < one.y < 160
    right, = place([(495, 150)], ["edge"], 6, inside)
    assert right.anchor == "end" and right.x < 495


def test_any_metric_can_be_plotted(make_result):
    from quantkit.evaluate.metric_table import MetricInfo

    result = make_result(plotted=("shift", "top1", "nowhere"))
    result.metrics["shift"] = MetricInfo("shift <x>", "ms", "higher", "run", "quantkit-mine")
    for row, value in zip(result.rows, (-3.0, -1.0, 2.0, 4.0)):
        row.metrics["shift"] = Interval(value, value - 1, value + 1)
    root = check(render(result))
    titles = [node.text for node in root.iter(f"{SVG}text") if node.get("class") == "title"]
    assert titles == ["shift <x>, ms, higher is better", "top-1, %, higher is better"]
    ticks = [node.text for node in root.iter(f"{SVG}text") if node.get("class") == "tick"]
    assert "-4" in ticks and "100" in ticks, "below zero, and shares in percent"
    heights = [float(node.get("cy")) for node in list(root.iter(f"{SVG}circle"))[:4]]
    assert heights == sorted(heights, reverse=True) and max(heights) < HEIGHT - 50


def test_only_spread_values_that_should_be_low_have_a_scale_of_roots(make_result, make_row):
    assert "√" in render(make_result()) and "√" not in render(make_result(plotted=("top1", "decode_tok_s")))
    assert "√" not in render(make_result([make_row("one", kl=0.1), make_row("two", kl=0.3)]))
