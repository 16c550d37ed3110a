"""Chats are kept in the browser: found, named, deleted, saved, and never without bounds."""

import json
from pathlib import Path

import pytest

from .conftest import answered, ask, playwright

expect = playwright.expect


def titles(page):
    return page.locator("#chat-list .title").all_inner_texts()


def act(page, action, title):
    """Choose something in a chat's menu."""
    page.get_by_role("button", name=f"Actions: {title}").click()
    page.get_by_role("menuitem", name=action).click()


def ready(page):
    expect(page.locator("#about")).to_contain_text("context")


def second_tab(page, url):
    """Another tab of the same browser."""
    other = page.context.new_page()
    other.goto(url)
    ready(other)
    return other


def test_chats_survive_a_reload(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    before = page.locator("#thread").inner_text()
    page.reload()
    ready(page)
    expect(page.locator(".assistant .speed")).to_contain_text("12 tokens")
    assert page.locator("#thread").inner_text() == before
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    ask(page, "about the dog")
    assert titles(page) == ["about the dog", "about the cat"]
    page.get_by_role("button", name="about the cat", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("about the cat")
    assert [message["content"] for message in ask(page, "more")["messages"]][::2] == ["about the cat", "more"]
    assert titles(page) == ["about the cat", "about the dog"]


def test_a_chat_is_renamed_deleted_and_brought_back(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    act(page, "Rename", "about the cat")
    page.get_by_label("Title of the chat").fill("Cats")
    page.keyboard.press("Enter")
    assert titles(page) == ["Cats"]
    expect(page.get_by_role("button", name="Cats", exact=True)).to_be_focused()
    act(page, "Delete", "Cats")
    assert titles(page) == [] and page.locator(".turn").count() == 0
    page.get_by_role("button", name="Undo").click()
    assert titles(page) == ["Cats"]
    act(page, "Delete", "Cats")
    page.reload()
    ready(page)
    assert titles(page) == []


@pytest.mark.slow
def test_a_title_that_is_being_written_and_the_focus_outlast_a_change_of_the_list(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    other = second_tab(page, shared.url)
    act(page, "Rename", "about the cat")
    page.get_by_label("Title of the chat").fill("Cats")
    ask(other, "about the dog")
    expect(page.get_by_label("Title of the chat")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#chat-list .title")).to_have_text(["about the dog", "Cats"])
    page.get_by_role("button", name="Actions: Cats").focus()
    ask(other, "more of the dog")
    expect(page.get_by_role("button", name="Actions: Cats")).to_be_focused()
    act(page, "Delete", "about the dog")
    expect(page.get_by_role("button", name="Cats", exact=True)).to_be_focused()


def test_a_chats_menu_is_used_by_keyboard_and_outlasts_a_change_of_the_list(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    other = second_tab(page, shared.url)
    more, items = page.get_by_role("button", name="Actions: about the cat"), page.get_by_role("menuitem")
    expect(more).to_have_attribute("aria-haspopup", "menu")
    more.press("Enter")
    expect(page.get_by_role("menu", name="Actions: about the cat")).to_be_visible()
    expect(more).to_have_attribute("aria-expanded", "true")
    expect(items).to_have_text(["Rename", "Save as Markdown", "Save as JSON", "Delete"])
    for key, place in (("ArrowDown", 1), ("s", 2), ("s", 1), ("End", 3), ("ArrowDown", 0), ("ArrowUp", 3),
                       ("Home", 0)):
        page.keyboard.press(key)
        expect(items.nth(place)).to_be_focused()
    page.keyboard.press("Escape")
    expect(items).to_have_count(0)
    expect(more).to_be_focused()
    expect(more).to_have_attribute("aria-expanded", "false")
    more.press("Enter")
    page.keyboard.press("Tab")
    expect(items).to_have_count(0)
    more.click()
    more.click()
    expect(items).to_have_count(0)
    more.click()
    ask(other, "about the dog")
    page.keyboard.press("r")
    page.keyboard.press("Enter")
    page.get_by_label("Title of the chat").fill("Cats")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-list .title")).to_have_text(["about the dog", "Cats"])


def test_a_chat_that_another_tab_deleted_cannot_be_renamed_or_saved(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    for action in ("Rename", "Save as Markdown", "Delete"):
        page.evaluate("store.remove('chat ' + chat.record.id)")  # before this page hears of it
        act(page, action, "about the cat")
        if action == "Rename":
            page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("isn't in this browser any more")
        assert titles(page) == [] and not page.evaluate(
            "[...store.names()].some((name) => name.startsWith('chat '))")
        page.evaluate("chat.keep()")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("turns", [None, "text", [None], [{"role": "system", "content": ""}],
                                   [{"role": "user"}], [{"role": "user", "content": "", "calls": [None]}]])
def test_what_is_no_chat_is_left_out(shared, visit, turns):
    page = visit(shared.url)
    page.evaluate("turns => store.write('chat x', { id: 'x', title: 'x', updated: 1, turns })", turns)
    page.goto(shared.url + "/#x")
    page.reload()
    ready(page)
    expect(page.locator("#notice")).to_contain_text("isn't in this browser any more")
    assert titles(page) == []


def test_a_chat_is_saved_as_json_and_markdown(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    saved = {}
    for kind in ("JSON", "Markdown"):
        with page.expect_download() as file:
            act(page, f"Save as {kind}", "about the cat")
        saved[kind] = Path(file.value.path()).read_text(encoding="utf-8")
    turns = json.loads(saved["JSON"])["turns"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    assert saved["Markdown"].startswith("# about the cat\n\n## You\n\nabout the cat\n\n## tiny\n\n")
    assert turns[1]["content"] in saved["Markdown"] and turns[1]["model"] == "tiny"
    named = page.evaluate("""() => chatMarkdown({ title: "", model: "new", turns: [
      { role: "assistant", model: "old", content: "" }, { role: "assistant", content: "" }] })""")
    assert "## old" in named and "## new" in named


def test_what_is_being_written_is_kept_when_the_page_closes(shared, visit, eventually):
    page = visit(shared.url, tokens=20000)
    page.fill("#input", "the cat")
    page.press("#input", "Enter")
    eventually(lambda: len(page.locator(".assistant .markdown").inner_text()) > 5)
    page.reload()
    answered(page)
    expect(page.locator(".assistant .speed")).to_contain_text("stopped")
    assert page.locator(".error").count() == 0
    assert len(page.locator(".assistant .markdown").inner_text()) > 5


def test_the_oldest_chats_make_room_and_the_user_is_told(shared, visit):
    page = visit(shared.url)
    page.evaluate("""() => {
      const big = (id, updated, size) => (
        { id, title: id, updated, turns: [{ role: "user", content: "x".repeat(size) }] });
      for (const size of [2 ** 20, 2 ** 16]) {
        for (let number = 0; store.write(`chat ${size}-${number}`, big(`${size}-${number}`, number, size));) {
          number += 1;
        }
      }
      store.memory.clear();
      chatHistory.put(big("new", 10 ** 6, 2 ** 20));
    }""")
    expect(page.locator("#notice")).to_contain_text("the oldest were dropped")
    assert page.evaluate("store.memory.size") == 0
    kept = titles(page)
    assert kept[0] == "new" and not {"1048576-0", "65536-0"} <= set(kept)


def test_a_chat_that_never_fits_drops_no_other(shared, visit):
    page = visit(shared.url)
    page.evaluate("""() => {
      const sized = (id, size) => (
        { id, title: id, updated: 1, turns: [{ role: "user", content: "x".repeat(size) }] });
      for (const id of ["first", "second"]) chatHistory.put(sized(id, 1000));
      chatHistory.put({ ...sized("big", 2 ** 24), updated: 2 });
    }""")
    expect(page.locator("#notice")).to_contain_text("No other chat was dropped.")
    assert titles(page)[0] == "big" and sorted(titles(page)[1:]) == ["first", "second"]
    page.reload()
    ready(page)
    assert sorted(titles(page)) == ["first", "second"]


def test_more_chats_than_the_list_has_are_dropped(shared, visit):
    page = visit(shared.url)
    page.evaluate("""() => {
      for (let number = 0; number <= MAX_CHATS; number++) {
        chatHistory.put({ id: String(number), title: String(number), updated: number, turns: [] });
      }
    }""")
    assert len(titles(page)) == 200 and "0" not in titles(page)


def test_without_storage_the_page_works_and_says_what_is_lost(shared, visit):
    page = visit(shared.url)
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error(); } })")
    page.reload()
    ready(page)
    expect(page.locator("#chats-note")).to_contain_text("lost when the page closes")
    ask(page, "the cat")
    assert titles(page) == ["the cat"]


def test_a_second_tab_shows_and_keeps_what_the_first_one_wrote(shared, visit):
    page = visit(shared.url)
    ask(page, "about the cat")
    other = second_tab(page, page.url)
    answered(other)
    ask(page, "and the dog")
    answered(other, 2)
    assert other.locator("#thread").inner_text() == page.locator("#thread").inner_text()
    ask(other, "and the bird")
    answered(page, 3)
    assert page.locator(".user .text").all_inner_texts() == ["about the cat", "and the dog", "and the bird"]
