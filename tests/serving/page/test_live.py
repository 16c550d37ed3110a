"""The panel and the timeline show what ``/trace`` says."""

import json
from pathlib import Path

import pytest

from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.loader import load
from tests.models.test_block_diffusion import diffusing

from .conftest import ask, playwright, send

expect = playwright.expect


@pytest.fixture
def server(live):
    """One whose answers are drafted."""
    return live(drafter=parse_drafter("ngram"))


def trace(server):
    with server.http as client:
        return client.get("/trace").json()


def show(page, eventually, requests):
    """Open the panel and wait until it knows that many requests that have ended."""
    page.get_by_role("button", name="Live", exact=True).click()
    eventually(lambda: page.evaluate("[...trace.requests.values()].filter(({ reason }) => reason).length")
               == requests)
    page.evaluate("timeline.window = MAX_WINDOW; timeline.draw()")


def test_every_span_of_an_answer_is_a_bar(server, visit, eventually):
    page = visit(server.url, tokens=60)
    ask(page, "the cat the cat the cat")
    ask(page, "again")
    show(page, eventually, 2)
    (model,) = trace(server)["models"]
    answers = page.evaluate("chat.record.turns.map(({ request }) => request).filter(Boolean)")
    assert len(answers) == 2
    for answer in answers:
        spans = [span for span in model["spans"] if span["request"] == answer]
        bars = page.evaluate("id => timeline.hits.filter(({ request }) => request.id === id)"
                             ".map(({ span }) => span)", answer)
        assert len(spans) > 3 and bars == spans
        assert {span["kind"] for span in bars} == {"queue", "prefill", "decode", "end"}
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("again")
    assert rows.first.locator("td").nth(5).inner_text() == "60"


def test_the_figures_are_the_engines(server, visit, eventually):
    page = visit(server.url, tokens=60)
    ask(page, "the cat the cat the cat")
    show(page, eventually, 1)
    (model,) = trace(server)["models"]
    stats = model["stats"]
    assert stats["drafted"] > 0, "the answer repeats itself, so that there is something to draft"
    expect(page.locator("#figure-rate .detail")).to_have_text(f"{stats['tokens_generated']} tokens so far")
    expect(page.locator("#figure-batch .value")).to_have_text("0 running")
    expect(page.locator("#figure-batch .detail")).to_contain_text("0 waiting · at most 8 run")
    expect(page.locator("#figure-drafts .detail")).to_have_text(
        f"{stats['accepted']} accepted · {stats['drafted'] - stats['accepted']} rejected")
    used = page.evaluate("value => bytes(value)", stats["kv_used_bytes"])
    expect(page.locator("#figure-kv .value")).to_have_text(used)
    expect(page.locator("#figure-kv .detail")).to_have_text("grows as needed")
    expect(page.locator("#figure-prefix .detail")).to_contain_text(f"of {stats['prefix_queries']} tokens")
    first = page.locator("#figure-first .value").inner_text()
    spans = [span for span in model["spans"] if span["kind"] == "decode"]
    delay = spans[0]["end"] - model["spans"][0]["start"]
    assert first == page.evaluate("value => seconds(value)", delay)
    eventually(lambda: page.locator("#figure-rate polyline").count() == 1)


def test_drafts_are_hidden_where_nothing_drafts(live, visit, eventually):
    page = visit(live().url)
    ask(page, "the cat the cat the cat")
    show(page, eventually, 1)
    expect(page.locator("#figure-rate")).to_be_visible()
    for name in ("#figure-drafts", "#requests .of-drafts", "#legend .of-steps"):
        expect(page.locator(name).locator("visible=true")).to_have_count(0)
    page.evaluate("trace.watch(false); trace.models.get('tiny').stats.drafted = 1; drawLive('')")
    for name, number in (("#figure-drafts", 1), ("#requests .of-drafts", 2), ("#legend .of-steps", 2)):
        expect(page.locator(name).locator("visible=true")).to_have_count(number)


def test_the_tokens_that_a_step_commits_to_a_block(live, visit, eventually, tmp_path):
    blocks = load(str(diffusing(tmp_path / "m", "sdar", 4, dtype="float32", max_position_embeddings=512)))
    page = visit(live(loaded=blocks).url, tokens=40)
    ask(page, "the cat")
    show(page, eventually, 1)
    expect(page.locator("#legend .of-steps").locator("visible=true")).to_have_count(2)
    for name in ("#figure-drafts", "#requests .of-drafts"):
        expect(page.locator(name).locator("visible=true")).to_have_count(0)
    told = page.evaluate("timeline.hits.filter(({ span }) => span.drafted)"
                         ".map(({ request, span }) => described(span, timeline.blocks(request)))")
    assert len(told) >= 10 and all(" masks committed" in text or "1 mask committed" in text for text in told)


@pytest.mark.parametrize("used, total, half, shown", [
    (11_000_000, 900, 40, ["11 MB of 3.5 GB", "22 MB in 16 bits"]),
    (9_940, 900, 20, ["9.9 kB of 3.5 GB", ""]),
    (9_960, None, 10, ["10 kB", "grows as needed · 5.0 kB in 16 bits"])])
def test_the_cache_is_told_in_bytes(shared, visit, used, total, half, shown):
    page = visit(shared.url)
    stats = {"kv_used_bytes": used, "kv_allocated_bytes": 3_500_000_000, "kv_pages_total": total,
             "kv_bytes_per_token": 20, "kv_bytes_per_token_bf16": half}
    page.evaluate("""(stats) => {
      const numbers = { max_batch: 8, running: 0, waiting: 0, preemptions: 0, tokens_generated: 0,
        prefix_hits: 0, prefix_queries: 0, prefix_cache_bytes: 0, drafted: 0, accepted: 0, block_size: 1 };
      panel.draw({ stats: { ...numbers, ...stats }, samples: [], firsts: [] });
    }""", stats)
    assert page.locator("#figure-kv .value, #figure-kv .detail").all_text_contents() == shown


def test_it_asks_only_while_it_is_open(server, visit, eventually):
    page = visit(server.url)
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/trace" in request.url else None)
    ask(page, "the cat")
    assert not asked
    show(page, eventually, 1)
    eventually(lambda: page.evaluate("trace.now") and len(asked) > 3)
    assert asked[0].endswith("since=1000000000") and asked[1].endswith("since=0")
    assert not asked[2].endswith("since=0"), "only what is new"
    page.get_by_role("button", name="Close", exact=True).click()
    eventually(lambda: not page.evaluate("trace.polling"))
    count = len(asked)
    ask(page, "more")
    assert len(asked) == count


def test_the_timeline_moves_zooms_and_tells_numbers(server, visit, eventually):
    page = visit(server.url, tokens=60)
    ask(page, "the cat the cat the cat")
    show(page, eventually, 1)
    page.get_by_role("button", name="Follow").click()
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    page.evaluate("""() => {
      const [request] = trace.requests.values();
      [timeline.right, timeline.window] = [request.end + 0.01, request.end - request.start + 0.02];
      timeline.draw();
    }""")
    canvas = page.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    place = page.evaluate("(({ left, right, top }) => ({ x: (left + right) / 2, y: top + 11 }))"
                          "(timeline.hits.find(({ span }) => span.drafted))")
    canvas.hover(position=place)
    expect(page.locator("#tip")).to_contain_text("decode step")
    expect(page.locator("#tip")).to_contain_text("accepted")
    window = page.evaluate("timeline.window")
    canvas.focus()
    page.keyboard.press("+")
    assert page.evaluate("timeline.window") < window
    right = page.evaluate("timeline.right")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("timeline.right") < right
    page.mouse.wheel(0, 400)
    eventually(lambda: page.evaluate("timeline.window") > window * 0.7)
    page.get_by_role("button", name="Follow").click()
    assert page.evaluate("timeline.following && timeline.right === trace.now")


def test_the_wheel_scrolls_the_panel_unless_it_is_meant_for_the_timeline(server, visit, eventually):
    page = visit(server.url, height=300)
    page.get_by_role("button", name="Live", exact=True).click()
    canvas = page.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    window, top = page.evaluate("[timeline.window, at('live').scrollTop]")
    page.mouse.wheel(0, -200)
    eventually(lambda: page.evaluate("at('live').scrollTop") < top)
    assert page.evaluate("timeline.window") == window
    canvas.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    eventually(lambda: page.evaluate("timeline.window") < window)


def test_a_server_without_a_trace_is_asked_once(server, visit):
    page = visit(server.url, refused=404)
    asked = []
    page.route("**/trace?*", lambda route: (asked.append(route.request.url), route.fulfill(
        status=404, json={"error": {"message": "a server of several replicas has no trace"}})))
    page.get_by_role("button", name="Live", exact=True).click()
    expect(page.locator("#live-state")).to_have_text(
        "no live figures: a server of several replicas has no trace")
    page.evaluate("trace.poll()")
    assert len(asked) == 1 and not page.evaluate("trace.open")


def test_the_trace_is_saved_for_perfetto(server, visit, eventually):
    page = visit(server.url)
    ask(page, "the cat")
    show(page, eventually, 1)
    with page.expect_download() as file:
        page.get_by_role("button", name="Save trace").click()
    events = json.loads(Path(file.value.path()).read_text(encoding="utf-8"))["traceEvents"]
    (model,) = trace(server)["models"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == [span["kind"] for span in model["spans"]]
    assert spans[1]["dur"] == pytest.approx(1e6 * (model["spans"][1]["end"] - model["spans"][1]["start"]))


def test_tens_of_thousands_of_spans_are_kept_within_bounds(server, visit):
    page = visit(server.url)
    page.get_by_role("button", name="Live", exact=True).click()
    bars, spans = page.evaluate("""() => {
      trace.watch(false);
      for (let request = 0; request < 500; request++) {
        for (let step = 0; step < 200; step++) {
          const start = request / 10 + step / 100;
          trace.add("tiny", { request: "r" + request, kind: "decode", start, end: start + 0.01, tokens: 1 });
        }
      }
      trace.trim();
      trace.now = 60;
      timeline.draw();
      return [timeline.hits.length, trace.spans];
    }""")
    assert 1000 < bars <= spans <= 60000


def test_a_server_that_began_anew_is_shown_from_its_start(server, visit, eventually):
    page = visit(server.url)
    ask(page, "the cat")
    page.evaluate("trace.now = 1e9; trace.add('tiny', { request: 'old', kind: 'end', start: 1, end: 1 })")
    show(page, eventually, 1)
    assert "old" not in page.evaluate("[...trace.requests.values()].map(({ id }) => id)")


def test_a_running_request_is_shown_while_it_runs(server, visit, eventually):
    page = visit(server.url, tokens=20000)
    page.get_by_role("button", name="Live", exact=True).click()
    send(page, "the cat")
    expect(page.locator("#figure-batch .value")).to_have_text("1 running")
    eventually(lambda: page.evaluate("timeline.hits.length") > 3)
    page.keyboard.press("Escape")
    expect(page.locator("#figure-batch .value")).to_have_text("0 running")
    eventually(lambda: page.evaluate("[...trace.requests.values()][0].reason") == "cancelled")
