"""Streams while nothing comes."""

import pytest

from .conftest import CHAT, MESSAGES, RESPONSES, TEXT, asked

PROMPT = "the cat sat " * 2000


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("path", "sign"), [
    (MESSAGES, 'event: ping\ndata: {"type":"ping"}'), (RESPONSES, "event: response.in_progress"),
    (CHAT, ": keep-alive"), (TEXT, ": keep-alive")])
def test_clients_are_told_that_a_long_prompt_is_being_read(live, monkeypatch, path, sign):
    monkeypatch.setattr("quantkit.serving.reply.QUIET_SECONDS", 0.001)
    text = live().post(path, {**asked(path, PROMPT, 2), "stream": True}).text
    blocks = text.split("\n\n")
    assert sum(block.startswith(sign) for block in blocks) > 1


def test_official_clients_read_over_it(live, monkeypatch):
    server, messages = live(), [{"role": "user", "content": PROMPT}]
    anthropic = pytest.importorskip("anthropic", reason="needs the official client: pip install anthropic")

    def texts() -> list[str]:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        with client.messages.stream(model="tiny", max_tokens=8, messages=messages,
                                    extra_body={"temperature": 0}) as stream:
            said = "".join(stream.text_stream)
        chat = server.openai().chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=True, temperature=0)
        response = server.openai().responses.create(
            model="tiny", input=PROMPT, max_output_tokens=8, stream=True, temperature=0)
        return [said, "".join(chunk.choices[0].delta.content or "" for chunk in chat),
                "".join(event.delta for event in response if event.type == "response.output_text.delta")]

    wanted = texts()
    monkeypatch.setattr("quantkit.serving.reply.QUIET_SECONDS", 0.001)
    assert texts() == wanted and wanted[0]
