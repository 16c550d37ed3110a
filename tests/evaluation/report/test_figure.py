"""The static pictures: the same bytes each time, nothing global touched, every name noted."""

import html
import re
import struct
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import pytest

from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.figure import draw, drawable, png, svg

SVG = "{http://www.w3.org/2000/svg}"


def written(document):
    """The texts of a picture, which matplotlib notes above their paths."""
    return [html.unescape(text) for text in re.findall(r"<!-- (.*?) -->", document)]


def test_both_panels_with_every_name_and_what_they_mean(rich):
    texts = written(svg(rich))
    for text in ("SmolLM2-360M-Instruct: quality, speed and memory", "KL against decode, tok/s",
                 "KL against weights and KV cache, GB",
                 "noise floor 0.00110: what is not above it is drawn here",
                 "better ↘", "↙ better", "KV none", "KV int4", "int8 kv int4"):
        assert text in texts, text
    assert rich.protocol.fingerprint in " ".join(texts)
    assert texts.count("int4-g64 kv int4") == 2, "on the frontier it is named in both"


def test_the_same_bytes_each_time_and_no_date(rich):
    document = svg(rich)
    assert svg(rich) == document and png(rich) == png(rich)
    assert "dc:date" not in document and not re.search(r"20\d\d-\d\d-\d\d", document)
    assert ElementTree.fromstring(document).find(f"{SVG}title").text.startswith("SmolLM2")


def test_it_names_no_font_and_loads_nothing(rich):
    document = svg(rich)
    assert "font-family" not in document and "<text" not in document
    addresses = set(re.findall(r"(?:href|src)=\"([^\"]*)\"", document))
    assert all(address.startswith("#") for address in addresses)


def test_png_is_wide_enough_to_post(rich):
    content = png(rich)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1320 and 1400 < height < 2000


def test_a_user_s_settings_neither_matter_nor_change(rich, monkeypatch):
    document = svg(rich)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "#123456")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    before = dict(matplotlib.rcParams)
    assert svg(rich) == document
    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_never_loaded():
    code = ("import sys; from quantkit.testing.results import sample_results; "
            "from quantkit.evaluation.report.figure import svg; "
            "svg(sample_results()['ordinary']); print('matplotlib.pyplot' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def marks(figure, panel):
    """(x, y, fill) of the variants of a panel, in their order."""
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_markerfacecolor())
            for line in figure.axes[panel].lines
            if line.get_marker() in ("o", "s", "^") and line.get_zorder() == 4]


def test_marks_stand_where_the_numbers_say_and_dominated_ones_are_hollow(rich):
    figure = draw(rich)
    speed = marks(figure, 0)
    assert [x for x, _, _ in speed] == [row.metrics["decode_tok_s"].value for row in rich.rows]
    assert speed[0][1] == speed[1][1] == 0.0011, "the reference and noise stand on the floor"
    assert [y for _, y, _ in speed[2:]] == [row.metrics["kl_mean"].value for row in rich.rows[2:]]
    hollow = [index for index, mark in enumerate(speed) if mark[2] == "#e9eaeb"]
    assert hollow == [2, 9, 10, 11], "the reference with an int4 cache, and nf4"
    assert figure.axes[0].get_yscale() == "log" and figure.axes[0].get_xscale() == "linear"


def test_the_labels_of_a_panel_lie_apart_and_inside(rich):
    figure = draw(rich)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent().padded(-0.5) for text in axes.texts if " kv " in text.get_text()]
        assert len(boxes) > 10
        for number, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:number])
            assert box.x0 >= axes.bbox.x0 and box.y0 >= axes.bbox.y0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("name", ["W" * 200, "模型" * 50, "$x^2$ a_b", "_hidden", "", "\x1b[31m",
                                 "<!-- & -->"])
def test_awkward_names(make_result, make_row, name):
    rows = [make_row(name, kl=0.1 * number, mb=100 + number) for number in range(3)]
    for row, kv in zip(rows, ("none", "int8", "$m$")):
        row.kv = kv
    result = make_result(rows)
    figure = draw(result)
    for text in [*figure.texts, *(label for axes in figure.axes for label in axes.texts)]:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text.get_text()
    document = svg(result)
    ElementTree.fromstring(document)
    assert max(map(len, written(document))) <= 115
    if name.startswith("$x"):
        assert any(name in text for text in written(document)), "no formula"


def test_metrics_that_are_asked_for_have_panels_against_bytes(make_result):
    result = make_result(plotted=("shift", "top1", "nowhere"))
    result.metrics["shift"] = MetricInfo("shift <x>", "ms", "higher", "run", "quantkit-mine")
    for row, value in zip(result.rows, (-3.0, -1.0, 2.0, 4.0)):
        row.metrics["shift"] = Interval(value, value - 1, value + 1)
    texts = written(svg(result))
    titles = [text for text in texts if text.endswith("is better")]
    assert titles == ["shift <x>, ms, higher is better", "top-1, %, higher is better"]
    figure = draw(result)
    assert len(figure.axes) == 4
    assert [y for _, y, _ in marks(figure, 2)] == [-3.0, -1.0, 2.0, 4.0]
    assert marks(figure, 3)[0][1] == 100, "in percent"


def test_without_kl_what_is_drawn_by_default_still_is(make_result):
    result = make_result()
    for row in result.rows:
        del row.metrics["kl_mean"]
    figure = draw(result)
    assert len(figure.axes) == 1 and "decode, tok/s, higher is better" in written(svg(result))


def test_what_cannot_be_drawn_says_so(make_result, make_row):
    assert "nothing was measured that can be drawn" in written(svg(make_result([])))
    assert not draw(make_result([])).axes
    alone = draw(make_result([make_row("only", kl=0)]))
    assert len(alone.axes) == 2


def test_letters_that_the_font_lacks_are_replaced():
    assert drawable("a½\n模") == "a½\ufffd\ufffd"
