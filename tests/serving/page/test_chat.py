"""Conversations: they stream, stop, go on, can be edited, and are there after a reload."""

import json

import pytest

from quantkit.runtime.loader import load
from quantkit.structure.base import ReasoningDelta, TextDelta
from quantkit.testing import tiny_model

from .conftest import answered, ask, playwright, send, set_field

expect = playwright.expect
LONG = 20000


def texts(page, role):
    return page.evaluate("role => chat.record.turns.filter((turn) => turn.role === role)"
                         ".map((turn) => turn.content)", role)


def test_an_answer_is_what_the_server_says(shared, visit):
    page = visit(shared.url)
    body = ask(page, "the cat")
    reply = shared.post("/v1/chat/completions", {**body, "stream": False, "stream_options": None}).json()
    assert texts(page, "assistant") == [reply["choices"][0]["message"]["content"]]
    assert body["messages"] == [{"role": "user", "content": "the cat"}] and body["max_tokens"] == 12
    expect(page.locator(".assistant .speed")).to_contain_text("12 tokens · ")
    expect(page.locator(".assistant .speed")).to_contain_text("cut at max tokens")


def test_it_streams_and_stops(shared, visit, eventually):
    page = visit(shared.url, tokens=LONG)
    send(page, "the cat")
    expect(page.locator("#send")).to_have_text("Stop")
    shown = page.locator(".assistant .markdown")
    eventually(lambda: len(shown.inner_text()) > 5)
    page.get_by_role("button", name="the cat", exact=True).click()  # the open chat: nothing is lost
    length = len(shown.inner_text())
    eventually(lambda: len(shown.inner_text()) > length)
    expect(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".assistant .speed")).to_contain_text("stopped")
    eventually(lambda: shared.engine.stats()["running"] == 0)


def test_the_end_stays_in_view_until_the_reader_scrolls_up(shared, visit, eventually):
    page = visit(shared.url, height=400, tokens=LONG)
    below = "at('scroll').scrollHeight - at('scroll').scrollTop - at('scroll').clientHeight"
    send(page, "word\n" * 60)
    eventually(lambda: len(page.locator(".assistant .markdown").inner_text()) > 1500)
    assert page.evaluate(below) < 60
    page.get_by_role("button", name="Live", exact=True).click()
    eventually(lambda: page.evaluate(below) < 60)
    page.locator("#scroll").hover()
    page.mouse.wheel(0, -600)
    eventually(lambda: page.evaluate("!chat.pinned"))
    before = page.evaluate(below)
    length = len(page.locator(".assistant .markdown").inner_text())
    eventually(lambda: len(page.locator(".assistant .markdown").inner_text()) > length + 300)
    assert page.evaluate(below) > min(before, 200)
    page.keyboard.press("Escape")
    answered(page)


def test_an_answer_that_was_cut_goes_on(shared, visit):
    page = visit(shared.url)
    ask(page, "the cat")
    (before,) = texts(page, "assistant")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    answered(page)
    (after,) = texts(page, "assistant")
    assert after.startswith(before) and len(after) > len(before)
    assert shared.post("/detokenize", {"tokens": sent.value.post_data_json["prompt"]}).json()[
        "prompt"].endswith("<|im_start|>assistant\n" + before)


def test_an_edited_message_replaces_what_came_after_it(shared, visit):
    page = visit(shared.url)
    ask(page, "first")
    ask(page, "second")
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("changed")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Edited message").press("Enter")
    answered(page, 1)
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "changed"}]
    expect(page.locator("#input")).to_be_focused()
    assert texts(page, "user") == ["changed"] and page.locator(".turn").count() == 2


def test_an_edit_that_cannot_be_sent_keeps_its_text_and_the_later_turns(shared, visit):
    page = visit(shared.url)
    ask(page, "first")
    ask(page, "second")
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edited message")
    field.fill("changed")
    set_field(page, "top_p", "3")
    field.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    page.evaluate("server.model = null; server.connect = async () => {}")
    set_field(page, "top_p", "")
    field.press("Enter")
    expect(field).to_have_value("changed")
    assert texts(page, "user") == ["first", "second"] and page.locator(".turn").count() == 4


def test_regenerating_asks_the_same_again(shared, visit):
    page = visit(shared.url)
    ask(page, "first")
    body = ask(page, "second")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".assistant").last.get_by_role("button", name="Regenerate").click()
    answered(page, 2)
    assert sent.value.post_data_json["messages"] == body["messages"]
    assert page.locator(".turn").count() == 4


def test_every_parameter_is_sent(shared, visit):
    page = visit(shared.url)
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 7, "seed": 3,
              "repetition_penalty": 1.1, "kv": "int8"}
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        page.fill(f"#field-{name}", str(value))
    page.fill("#field-stop", "END\n###")
    page.fill("#system", "Be brief.")
    page.get_by_role("button", name="Done").click()
    body = ask(page, "the cat")
    assert {name: body[name] for name in values} == values and body["stop"] == ["END", "###"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    expect(page.locator("#about")).to_contain_text("context")
    assert page.input_value("#field-top_k") == "40" and page.input_value("#system") == "Be brief."
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset to defaults").click()
    assert page.input_value("#field-top_k") == "" and page.input_value("#field-temperature") == "0.7"


def test_a_value_out_of_range_is_named_and_not_sent(shared, visit):
    page = visit(shared.url)
    set_field(page, "top_p", "3")
    send(page, "the cat")
    expect(page.locator("#field-top_p-hint")).to_have_text("must be at most 1")
    expect(page.locator("#field-top_p")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#settings #refused")).to_have_text("Nothing was sent: Top p can't be used.")
    page.keyboard.press("Escape")
    expect(page.locator("#refused")).to_have_text("")
    assert page.input_value("#input") == "the cat" and page.locator(".turn").count() == 0
    set_field(page, "top_p", "0,9")  # a comma may be the decimal sign
    assert ask(page, "the cat")["top_p"] == 0.9
    set_field(page, "max_tokens", "1,000")
    expect(page.locator("#field-max_tokens-hint")).to_have_text("is no number")


def test_an_error_stands_in_the_answer_and_can_be_tried_again(shared, visit):
    page = visit(shared.url, refused=400)
    set_field(page, "kv", "int9")
    send(page, "the cat")
    expect(page.locator(".assistant .error")).to_contain_text("int9")
    set_field(page, "kv", "")
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    assert page.locator(".error").count() == 0
    body = ask(page, "more")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


def test_an_answer_that_breaks_off_is_an_error_and_can_go_on(shared, visit):
    page = visit(shared.url)
    events = "".join(f'data: {{"id": "a", "choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'
                     for text in ("the ", "dog"))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events))
    send(page, "the cat")
    expect(page.locator(".assistant .error")).to_have_text("the answer broke off")
    assert texts(page, "assistant") == ["the dog"]
    page.get_by_role("button", name="Continue").click()
    answered(page)
    expect(page.locator(".assistant .error")).to_have_count(0)
    (answer,) = texts(page, "assistant")
    assert answer.startswith("the dog") and len(answer) > len("the dog")


@pytest.mark.parametrize("text", ["", "```python\n"], ids=["no text", "only a fence"])
def test_an_answer_without_text_says_so(shared, visit, text):
    page = visit(shared.url)
    event = json.dumps({"id": "a", "choices": [{"delta": {"content": text}, "finish_reason": "length"}]})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=f"data: {event}\n\ndata: [DONE]\n\n"))
    send(page, "the cat")
    expect(page.locator(".assistant .markdown")).to_have_text("empty answer")
    assert texts(page, "assistant") == [text]


def test_an_edit_that_is_given_up_changes_nothing(shared, visit):
    """Which keys of an input method neither send nor close."""
    page = visit(shared.url)
    ask(page, "first")
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edited message")
    for key in ("Enter", "Escape"):
        field.dispatch_event("keydown", {"key": key, "isComposing": True, "bubbles": True})
        field.dispatch_event("keydown", {"key": key, "keyCode": 229, "bubbles": True})
    field.fill("changed")
    page.keyboard.press("Escape")
    expect(page.locator(".user .text")).to_have_text("first")
    expect(page.get_by_role("button", name="Edit")).to_be_focused()
    assert texts(page, "user") == ["first"]


def test_reasoning_and_tool_calls_are_shown_as_text(shared, visit, scripted):
    scripted()
    page = visit(shared.url)
    ask(page, "the cat")
    expect(page.locator(".assistant summary")).to_have_text("Reasoning")
    assert page.locator(".thoughts").text_content() == "I need a tool."
    expect(page.locator(".assistant > .markdown")).to_have_text("Let me look.")
    expect(page.locator(".calls")).to_have_text('look({"place": "here"})\nwait({})')


def test_reasoning_is_markdown_apart_from_the_answer(shared, visit, scripted):
    scripted([[ReasoningDelta("1. **Read** both")], [ReasoningDelta(" numbers.\n2. Add.")],
              [TextDelta("# Four")]])
    page = visit(shared.url, tokens=3)
    for _ in range(2):
        answered(page) if page.locator(".turn").count() else ask(page, "the cat")
        page.locator(".assistant summary").click()
        expect(page.locator(".thoughts li")).to_have_text(["Read both numbers.", "Add."])
        expect(page.locator(".thoughts strong")).to_have_text("Read")
        gap = page.evaluate("""document.querySelector(".assistant > .markdown h3").getBoundingClientRect().top
            - document.querySelector(".thoughts").getBoundingClientRect().bottom""")
        assert gap >= 12
        page.reload()


@pytest.mark.parametrize("allowed", [True, False])
def test_copying_says_what_became_of_it(shared, visit, allowed):
    page = visit(shared.url, permissions=["clipboard-read", "clipboard-write"] if allowed else [])
    if not allowed:
        page.evaluate("void (navigator.clipboard.writeText = async () => { throw new DOMException('no'); })")
    ask(page, "the cat")
    page.locator(".user").get_by_role("button", name="Copy").click()
    expect(page.locator(".user .compact").first).to_have_text("Copied" if allowed else "Not allowed here")
    if allowed:
        assert page.evaluate("navigator.clipboard.readText()") == "the cat"
    expect(page.locator(".user .compact").first).to_have_text("Copy")


def test_a_model_without_a_template_continues_the_text(live, visit, tmp_path):
    folder = tiny_model(tmp_path / "plain", dtype="float32")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    page = visit(live(loaded=load(str(folder))).url)
    body = ask(page, "the cat")
    assert body["prompt"] == "the cat" and "messages" not in body
    (answer,) = texts(page, "assistant")
    assert ask(page, " and")["prompt"] == "the cat" + answer + " and"


def test_it_works_behind_a_path_prefix(shared, browser):
    page = browser.new_page()
    page.route("**/under/here/**", lambda route: route.continue_(
        url=route.request.url.replace("/under/here/", "/")))
    page.goto(f"{shared.url}/under/here/")
    expect(page.locator("#about")).to_contain_text("context")
    set_field(page, "max_tokens", "12")
    ask(page, "the cat")
    page.close()


@pytest.mark.parametrize("in_address", [False, True], ids=["asked for", "in the address"])
def test_a_key_is_the_browsers_password(live, visit, in_address):
    server = live(key="secret")
    if in_address:
        page = visit(server.url.replace("://", "://user:secret@"))
    else:
        page = visit(server.url, http_credentials={"username": "user", "password": "secret"})
    ask(page, "the cat")
