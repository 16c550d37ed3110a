"""The page on small and large screens, in light and dark, by keyboard."""

import re
from itertools import product

import pytest

from quantkit.runtime.drafting.base import parse_drafter

from .conftest import ask, playwright

expect = playwright.expect
WIDE = ("# A heading\n\n" + "long" * 60 + "\n\n| " + " | ".join("column" for _ in range(12)) + " |\n|"
        + "---|" * 12 + "\n\n```python\n" + "code = 1; " * 40 + "\n```\n\nhttps://a.example/" + "path" * 40)


def overflow(page):
    return page.evaluate("[document.documentElement, document.body, at('scroll'), at('live')]"
                         ".map((node) => node.scrollWidth - node.clientWidth)")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(live, loaded, twin, visit, width):
    server = live(models={"a-model-with-a-long-name-" * 4: loaded, "other": twin},
                  drafter=parse_drafter("ngram"))
    page = visit(server.url, width=width, height=740)
    assert overflow(page) == [0] * 4
    ask(page, "word" * 100)
    page.evaluate("""(text) => {
      chat.record.turns[1].content = chat.record.turns[1].reasoning = text;
      chat.record.turns[1].calls = [{ name: "call", arguments: "x".repeat(300) }];
      chat.show(chat.record);
    }""", WIDE)
    assert overflow(page) == [0] * 4
    page.get_by_role("button", name="Chats").click()
    assert overflow(page) == [0] * 4
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Compare").click()
    page.fill("#input", "word" * 50)
    page.press("#input", "Enter")
    expect(page.locator(".side .speed").filter(has_text="first after")).to_have_count(2)
    assert overflow(page) == [0] * 4
    page.get_by_role("button", name="Live", exact=True).click()
    expect(page.locator("#figure-batch .value")).to_have_text("0 running")
    assert overflow(page) == [0] * 4
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate("at('settings').scrollWidth - at('settings').clientWidth") == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_buttons_of_an_answer_stand_in_one_line_beside_its_figures(shared, visit, width):
    page = visit(shared.url, width=width)
    ask(page, "the cat")
    if width > 1000:
        page.get_by_role("button", name="Live", exact=True).click()
    boxes = [button.bounding_box() for button in page.locator(".assistant .compact").all()]
    figures = page.locator(".assistant .speed").bounding_box()
    assert len(boxes) == 3 and len({box["y"] for box in boxes}) == 1
    assert all(box["x"] + box["width"] <= width for box in boxes)
    assert figures["y"] - boxes[0]["height"] < boxes[0]["y"] < figures["y"] + figures["height"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_table_of_requests_is_not_cut(shared, visit, width, eventually):
    page = visit(shared.url, width=width)
    ask(page, "the cat and a long prompt after it, longer than any column")
    page.get_by_role("button", name="Live", exact=True).click()
    eventually(lambda: page.locator("#requests tbody tr").count() > 0)
    page.evaluate("""() => {
      for (const { totals } of trace.requests.values()) {
        Object.assign(totals, { queue: 0.0004, prefill: 12.3, decode: 45.6, prompt: 12345, cached: 12288 });
      }
      timeline.table();
    }""")
    assert page.evaluate("document.querySelector('#live .table-box').scrollWidth"
                         "- document.querySelector('#live .table-box').clientWidth") == 0


def luminance(color):
    parts = [int(part, 16) / 255 for part in re.findall("..", color.strip("#"))]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_enough(shared, visit, scheme):
    page = visit(shared.url, color_scheme=scheme)
    colors = page.evaluate("""(names) => Object.fromEntries(names.map((name) => (
      [name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim()])))""",
        ["page", "card", "ink", "soft", "edge", "accent", "on-accent", "mine", "bad", "bad-back", "code",
         "mark", "on-mark", "comment", "string", "number", "keyword"])
    assert (luminance(colors["page"]) < 0.05) == (scheme == "dark")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb({}, {}, {})".format(*bytes.fromhex(colors["page"].strip("#")))
    pairs = [*product(("ink", "soft", "accent"), ("page", "card")), ("ink", "mine"), ("on-accent", "accent"),
             ("bad", "bad-back"), ("bad", "card"), ("ink", "code"), ("on-mark", "mark"), ("soft", "code"),
             *product(("comment", "string", "number", "keyword"), ("code",))]
    weak = {pair: ratio for pair in pairs if (ratio := contrast(*(colors[name] for name in pair))) < 4.5}
    assert not weak
    assert contrast(colors["edge"], colors["card"]) >= 3, "the edges of fields"


def test_the_drawer_opens_closes_and_gives_the_focus_back(shared, visit):
    page = visit(shared.url, width=390, height=844)
    expect(page.locator("#chats")).to_be_hidden()
    ask(page, "the cat")
    page.get_by_role("button", name="Chats").click()
    expect(page.get_by_role("button", name="the cat", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.get_by_role("button", name="Chats")).to_be_focused()
    page.get_by_role("button", name="Chats").click()
    page.mouse.click(380, 400)
    expect(page.locator("#chats")).to_be_hidden()


def test_everything_is_reached_by_keyboard_and_has_a_name(live, loaded, twin, visit):
    page = visit(live(models={"one": loaded, "other": twin}).url)
    ask(page, "the cat")
    page.get_by_role("button", name="Live", exact=True).click()
    names = page.evaluate("""() => {
      const labels = (node) => [node.getAttribute("aria-label"), node.textContent.trim(),
        node.labels?.[0]?.textContent.trim()];
      const nodes = document.querySelectorAll("button, input, select, textarea, canvas");
      return [...nodes].map((node) => labels(node).find(Boolean) ?? "");
    }""")
    assert len(names) > 30 and all(names)
    page.get_by_role("button", name="Chats").focus()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"models", "compare-toggle", "settings-toggle", "fresh", "the cat", "Edit", "Regenerate", "input",
            "send", "live-model", "follow", "zoom-in", "download-trace", "timeline"} <= reached
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#system")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_nothing_moves_for_those_who_want_no_motion(shared, visit, eventually):
    page = visit(shared.url, tokens=20000, reduced_motion="reduce")
    page.fill("#input", "the cat")
    page.press("#input", "Enter")
    eventually(lambda: page.locator(".assistant.writing .markdown > *").count() > 0)
    assert page.evaluate("document.getAnimations().length") == 0
