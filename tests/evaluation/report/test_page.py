"""The page in a real browser without a network: everything is drawn, nothing is complained about."""

from __future__ import annotations

import math

import pytest

from quantkit.evaluation.report.html import render
from quantkit.evaluation.report.page.passage import largest, shaded, summary, visible
from quantkit.evaluation.result import TokenDiff
from quantkit.testing.results import sample_results
from tests.helpers.chromium import chromium

from .rich import rich_result

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra dev: playwright")
WAIT = 60_000
DRAWN = "document.documentElement.dataset.drawn === 'true'"
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def browser():
    """Chromium, as the machine has it."""
    with chromium(playwright) as program:
        yield program


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """``files(result)``: the path of its page, rendered once."""
    folder, paths = tmp_path_factory.mktemp("pages"), {}

    def write(name, result):
        if name not in paths:
            paths[name] = folder / f"{len(paths)}.html"
            paths[name].write_bytes(render(result).encode("utf-8", "replace"))
        return paths[name]

    return write


@pytest.fixture
def visit(browser):
    """``visit(path, width=…, **context)``: the open page with all charts drawn. No request may leave and the
    console must stay empty."""
    contexts = []
    problems = []
    requests = []

    def open_page(path, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function(DRAWN)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
    assert all(url.startswith("file:") for url in requests) and len(requests) == len(contexts)


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize(("width", "scheme"), [
    (390, "light"), (1280, "dark"), *(pytest.param(*sizes, marks=pytest.mark.slow)
                                      for sizes in ((390, "dark"), (1280, "light")))])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_screen(files, visit, width, scheme):
    page = visit(files("rich", rich_result()), width, color_scheme=scheme)
    charts = page.locator("[data-chart]")
    assert charts.count() == 13 and page.locator(".failed").count() == 0
    for number in range(13):
        chart = charts.nth(number)
        assert chart.locator("svg.marks path").count() > 3, chart.get_attribute("data-chart")
        box = chart.locator("svg.marks").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1 and box["height"] > 80
    assert overflow(page) == 0
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 26)"
    assert dark == (scheme == "dark")


def test_names_stand_beside_their_marks_and_apart(files, visit):
    page = visit(files("rich", rich_result()))
    boxes = page.evaluate("""() => [
      ...document.querySelectorAll("[data-chart=frontier-speed] .best_names text")]
      .filter((node) => getComputedStyle(node).opacity !== "0" && node.getAttribute("opacity") !== "0")
      .map((node) => { const box = node.getBoundingClientRect();
        return [node.textContent, box.left, box.top, box.right, box.bottom]; })""")
    assert len(boxes) >= 8 and "int8 kv none" in {box[0] for box in boxes}
    for number, (_, left, top, right, bottom) in enumerate(boxes):
        for _, left2, top2, right2, bottom2 in boxes[:number]:
            assert min(right, right2) - max(left, left2) < 3 or min(bottom, bottom2) - max(top, top2) < 3


def test_a_mark_tells_its_numbers(files, visit):
    page = visit(files("rich", rich_result()))
    page.locator("[data-chart=frontier-speed] .best_marks path").nth(3).hover()
    tip = page.locator("#vg-tooltip-element.visible")
    playwright.expect(tip).to_contain_text("int8 kv int8")
    playwright.expect(tip).to_contain_text("0.00370 (0.00348–0.00392)")


def test_a_token_tells_what_was_expected(files, visit):
    page = visit(files("rich", rich_result()), 390, has_touch=True)
    page.locator(".passage .differs").first.tap()
    note = page.locator(".chosen-token")
    playwright.expect(note).to_contain_text("the reference expects “ blue”, the variant “ green”")
    assert page.locator(".passage .chosen").count() == 1
    assert page.locator(".passage").inner_text().count("⏎\n") == 8
    box = page.locator(".passage").bounding_box()
    assert box["width"] <= 390
    assert page.locator(".passage").evaluate("node => node.scrollWidth - node.clientWidth") == 0


def test_a_variant_is_chosen_for_the_text_by_token(files, visit):
    result = rich_result()
    result.other_diffs = [result.diff.model_copy(update={
        "candidate": "nf4 kv none", "tokens": ("else", *result.diff.tokens[1:])})]
    page = visit(files("variants", result))
    shown = page.locator(".passage:visible")
    assert shown.count() == 1 and "else" not in shown.inner_text()
    page.locator("select.variant").select_option("nf4 kv none")
    assert shown.count() == 1 and shown.inner_text().startswith("else")


def test_wide_tables_scroll_in_their_box_and_keep_the_names(files, visit):
    page = visit(files("rich", rich_result()), 390)
    box = page.locator("#variants .scroll")
    assert box.evaluate("node => node.scrollWidth > node.clientWidth")
    box.evaluate("node => node.scrollLeft = 300")
    name = page.locator("#variants tbody th").first
    assert 0 <= name.bounding_box()["x"] < 40


def test_nothing_that_a_result_says_is_run(files, visit):
    result = rich_result()
    row = result.rows[3]
    row.model = f"x/{HOSTILE}"
    row.method = HOSTILE
    row.answer = HOSTILE
    row.tool = HOSTILE
    result.question = HOSTILE
    result.diff = result.diff.model_copy(update={"tokens": (HOSTILE, *result.diff.tokens[1:])})
    page = visit(files("hostile", result))
    page.locator("[data-chart=frontier-speed] .best_marks path").nth(2).hover()
    playwright.expect(page.locator("#vg-tooltip-element.visible")).to_contain_text("onerror")
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0


def test_a_change_of_width_and_of_the_scheme_draws_again(files, visit):
    page = visit(files("rich", rich_result()))
    label = page.locator("[data-chart=texts] .role-axis-label text").first
    before = label.evaluate("node => node.getAttribute('fill')")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("before => document.querySelector('[data-chart=texts] .role-axis-label text')"
                           "?.getAttribute('fill') !== before", arg=before)
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("() => [...document.querySelectorAll('[data-chart] svg.marks')]"
                           ".every((chart) => chart.getBoundingClientRect().width <= 390)")
    assert overflow(page) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(sample_results()))
def test_awkward_results_are_shown_too(files, visit, name):
    page = visit(files(name, sample_results()[name]), 390)
    assert page.locator(".failed").count() == 0 and overflow(page) == 0


def diff(tokens, kl, expected):
    return TokenDiff(text="code", reference="bf16", candidate="int4", tokens=tuple(tokens), kl=tuple(kl),
                     loss=(0.5,) * len(tokens), expected=tuple(expected))


def test_shades_grow_with_kl_and_notes_say_what_was_expected():
    text = shaded(diff(["a", " b", "c", "d"], [0.0, 0.01, 0.29, 7.0], [None, None, None, ("x\n", " y")]))
    assert [token.level for token in text.tokens] == [0, 1, 3, 5]
    assert [token.differs for token in text.tokens] == [False, False, False, True]
    assert text.tokens[3].note == ("“d”: KL 7.00, loss 0.500 nats above the reference's; the reference "
                                   "expects "
                                   "“x⏎”, the variant “ y”")


def test_white_space_can_be_seen_and_keeps_its_effect():
    assert visible("\n\n") == "⏎\n⏎\n" and visible("\tx ") == "⇥\tx "
    assert visible("\x1b[2J\x00") == "␛[2J␀" and visible("\u202e") == "\ufffd"


def test_the_summary_counts(rich):
    sentences = summary(rich.diff)
    differs = sum(expected is not None for expected in rich.diff.expected)
    assert f"At {differs} of {len(rich.diff.tokens)} tokens" in sentences[0] and len(sentences) == 1
    long = diff(["a"] * 4000, [0.0] * 4000, [None] * 4000)
    assert "first 3,000" in summary(long)[1] and len(shaded(long).tokens) == 3000


def test_the_largest_differences_stand_in_a_table():
    table = largest(diff(["Light", " is", " blue", "."], [0.0, 2.0, math.inf, 0.5],
                         [None, ("a", "b"), ("c", "d"), ("e", "f")]))
    assert [row[1] for row in table.rows] == ["“ is”", "“.”"], "what is not finite has no rank"
    assert table.rows[1] == ("“Light is blue”", "“.”", "“e”", "“f”", "0.500")
    assert largest(diff(["a"], [1.0], [None])) is None
