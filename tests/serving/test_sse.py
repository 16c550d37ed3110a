"""Streams while nothing comes."""

import pytest

PROMPT = "the cat sat " * 2000


@pytest.mark.parametrize(("path", "body", "sign"), [
    ("/v1/messages", {"max_tokens": 2}, 'event: ping\ndata: {"type":"ping"}'),
    ("/v1/responses", {"input": PROMPT, "max_output_tokens": 2}, "event: response.in_progress"),
    ("/v1/chat/completions", {"max_tokens": 2}, ": keep-alive"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, ": keep-alive")])
def test_clients_are_told_that_a_long_prompt_is_being_read(live, monkeypatch, path, body, sign):
    monkeypatch.setattr("quantkit.serving.sse.QUIET_SECONDS", 0.001)
    if path in ("/v1/messages", "/v1/chat/completions"):
        body = {**body, "messages": [{"role": "user", "content": PROMPT}]}
    text = live().post(path, {**body, "stream": True}).text
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
    monkeypatch.setattr("quantkit.serving.sse.QUIET_SECONDS", 0.001)
    assert texts() == wanted and wanted[0]
