"""The page as a file: it loads nothing, runs nothing of what it shows, and has a section for all data."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.html import render

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
SECTIONS = ["variants", "frontier", "texts", "differences", "tasks", "decode", "prefill", "memory",
            "roofline",
            "sensitivity", "diff", "kernels", "answers", "protocol"]


class Page(HTMLParser):
    """Everything of a page that a test asks for."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.shown = []
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.shown.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def charts(self):
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def page():
    from .rich import rich_result

    return Page(render(rich_result()))


def test_every_section_is_there_once(page):
    assert [section["id"] for section in page.all("section")] == SECTIONS
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in SECTIONS]


def test_every_chart_has_its_specification_a_place_and_a_description(page):
    places = [division for division in page.all("div") if "data-chart" in division]
    assert [place["data-chart"] for place in places] == list(page.charts) == [
        "frontier-speed", "frontier-bytes", "texts", "tasks", "decode-by-batch", "decode-by-context", "gaps",
        "prefill", "first-token", "memory", "roofline-1", "roofline-2", "sensitivity"]
    assert all(place["aria-label"] for place in places)
    assert page.charts["frontier-speed"]["description"].startswith(
        "KL against decode, tok/s. On the frontier: ")


def test_it_loads_nothing(page):
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "data", "action", "poster", "background"):
            assert name not in attributes, (tag, attributes)
        assert attributes.get("href", "#").startswith("#"), (tag, attributes)
    assert not page.all("link") and not page.all("iframe")
    specs = page.scripts[0]
    assert set(re.findall(r"https?://[^\"]*", specs)) == {page.charts["texts"]["$schema"]}, "a name"
    assert '"url"' not in specs
    assert not re.search(r"url\(|@import", render.__globals__["_read"]("style.css"))


def test_only_its_own_scripts_may_run(page):
    policy = next(meta["content"] for meta in page.all("meta")
                  if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert "connect-src" not in policy and "http" not in policy
    allowed, = re.findall(r"script-src ([^;]*);", policy)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
              for script in page.scripts[1:]}
    assert set(allowed.split()) == hashes and len(hashes) == 2
    assert len(page.scripts[1]) > 500_000 > len(page.scripts[2]), "Vega stands there once"


def test_headings_and_tables_are_announced(page):
    assert len(page.all("h1")) == 1
    assert {head.get("scope") for head in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table")) > 10
    assert page.all("html")[0]["lang"] == "en"


def test_whatever_is_shown_is_text(rich):
    row = rich.rows[3]
    row.model = f"x/{HOSTILE}"
    row.method = HOSTILE
    row.answer = HOSTILE
    row.tool = HOSTILE
    row.kernels = {"decode": {HOSTILE: 1}}
    row.texts = {HOSTILE: row.metrics}
    rich.question, rich.command = HOSTILE, f"quantkit eval {HOSTILE!r}"
    rich.sensitivity.append((f"model.layers.0.{HOSTILE}", 0.1))
    rich.diff = rich.diff.model_copy(update={"text": HOSTILE, "tokens": (HOSTILE, *rich.diff.tokens[1:]),
                                             "expected": ((HOSTILE, HOSTILE), *rich.diff.expected[1:])})
    rich.roofline[0] = rich.roofline[0].model_copy(update={"label": HOSTILE})
    page = Page(render(rich))
    assert len(page.scripts) == 3 and not page.all("img")
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "".join(page.shown).count("window.hacked") > 10, "all of it can be read"
    assert "<" not in page.scripts[0] and page.charts["sensitivity"]


def test_only_what_was_measured_has_a_section(make_result, make_row):
    page = Page(render(make_result([make_row("one", prefill=None), make_row("two", prefill=None)])))
    assert [section["id"] for section in page.all("section")] == ["variants", "frontier",
        "kernels", "protocol"]
    assert list(page.charts) == ["frontier-bytes"]
    empty = Page(render(make_result([])))
    assert [section["id"] for section in empty.all("section")] == ["protocol"]
    assert len(empty.scripts) == 2, "without charts there is no Vega"


def test_the_headline_and_the_command_come_first(make_result):
    text = "".join(Page(render(make_result(command="quantkit eval a 'b c'"))).shown)
    places = [text.index(words) for words in ("Take int8", "1.65 times", "quantkit eval a 'b c'",
                                              "The frontier")]
    assert places == sorted(places)


def test_what_is_missing_in_the_picture_is_named(make_result, make_row):
    ruined = make_row("ruined")
    ruined.metrics["kl_mean"] = Interval(math.inf, 1.0, math.inf)
    text = "".join(Page(render(make_result([make_row("fine"), ruined]))).shown)
    assert "missing or not finite: ruined." in text


def test_numbers_that_are_not_finite_do_not_spoil_a_chart(rich):
    row = rich.rows[4]
    row.metrics["decode_tok_s"] = Interval(math.nan, math.nan, math.nan)
    cells = row.speed.decode
    broken = cells[0].model_copy(update={"tok_s": cells[0].tok_s.model_copy(update={"median": math.inf})})
    row.speed = row.speed.model_copy(update={"decode": (broken, *cells[1:]), "gap_ms": {"median": math.nan}})
    rich.sensitivity[0] = (rich.sensitivity[0][0], math.inf)
    rich.diff = rich.diff.model_copy(update={"kl": (math.nan, math.inf, *rich.diff.kl[2:])})
    operators = rich.roofline[0].operators
    stopped = operators[0].model_copy(
        update={"seconds": operators[0].seconds.model_copy(update={"median": math.inf})})
    rich.roofline[0] = rich.roofline[0].model_copy(update={"operators": (stopped, *operators[1:])})
    assert set(Page(render(rich)).charts) >= {"frontier-speed", "sensitivity", "roofline-1"}
