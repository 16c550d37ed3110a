"""The page in a real browser. Whatever a test does, nothing may be complained about and nothing may leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.chromium import chromium

from ..conftest import DEADLINE

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra dev: playwright")
Visit = Callable[..., Any]
playwright.expect.set_options(timeout=DEADLINE * 1000)


# not of the session: while playwright runs, other tests of this process can't run an event loop
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, as the machine has it."""
    with chromium(playwright) as program:
        yield program


@pytest.fixture
def visit(browser) -> Iterator[Visit]:
    """``visit(url, width=…, height=…, tokens=…, refused=…, **context)`` → the open page. Its answers are
    greedy and have ``tokens`` tokens; ``refused`` is the status of requests that the test wants refused."""
    contexts = []
    problems = []
    asked = set()
    servers = set()

    def open_page(url: str, width: int = 1280, height: int = 800, tokens: int = 12, refused: int = 0,
                  **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE * 1000)
        page.on("console", lambda message: problems.append(message.text)
                if message.type == "error" and f"status of {refused}" not in message.text else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.add(server_of(request.url)))
        servers.add(server_of(url))
        page.goto(url)
        playwright.expect(page.locator("#about")).to_contain_text("context")
        set_field(page, "temperature", "0")
        set_field(page, "max_tokens", str(tokens))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
    assert asked - {""} == servers


def server_of(url: str) -> str:
    """Host and port; nothing of an address that is no server's, as ``blob:`` and ``data:``."""
    return urlsplit(url).netloc.rpartition("@")[2]


def set_field(page: Any, name: str, text: str) -> None:
    """Write into a parameter's field, whether the settings are open or not."""
    page.evaluate("""([name, text]) => {
      const field = at("field-" + name);
      field.value = text;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }""", [name, text])


def send(page: Any, text: str) -> None:
    """Write a message and send it."""
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Any, answers: int = 1) -> None:
    """Wait until that many answers stand there, all complete."""
    expect = playwright.expect
    expect(page.locator(".assistant .speed").filter(has_text="token")).to_have_count(answers)
    expect(page.locator("#send")).to_have_text("Send")


def ask(page: Any, text: str) -> dict[str, Any]:
    """Send a message and wait for its answer. Returns the body of the request."""
    answers = page.locator(".assistant").count()
    with page.expect_request(lambda request: request.method == "POST") as sent:
        send(page, text)
    answered(page, answers + 1)
    return sent.value.post_data_json
