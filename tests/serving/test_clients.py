"""Requests of agents and chat clients, recorded from the real programs and reduced, against a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.serving.record_requests import expand

FOLDER = Path(__file__).parent / "clients"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CASES = [pytest.param(request, id=f"{client}-{number}")
         for client, requests in RECORDED.items() for number, request in enumerate(requests)]
FIRST_EVENT = {"/v1/messages": "event: message_start", "/v1/responses": "event: response.created",
               "/v1/chat/completions": "data: {"}


def send(server, request: dict[str, Any]) -> tuple[int, dict[str, str], str]:
    """Status, headers, and the beginning of the body, after which the client leaves: most ask for more tokens
    than a test should wait for."""
    body = expand(request["body"]) if "body" in request else None
    with server.http as client, client.stream(request["method"], request["path"], json=body,
                                              headers=request["headers"]) as answer:
        if body and body.get("stream") and answer.status_code == 200:
            return answer.status_code, dict(answer.headers), next(answer.iter_lines())
        return answer.status_code, dict(answer.headers), answer.read().decode()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("request_", CASES)
def test_recorded_requests_are_answered(shared, request_):
    status, headers, text = send(shared, request_)
    assert status == 200, text
    path = request_["path"].partition("?")[0]
    if "body" in request_ and request_["body"].get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        assert text.startswith(FIRST_EVENT[path])
    elif "body" in request_:
        assert json.loads(text)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(("client", "number", "named"), [
    ("claude_code", 1, ["context_management", "output_config.effort"]),
    ("codex", 0, ["client_metadata", "web_search"]),
    ("codex", 3, ["tool_search", "web_search", "text.verbosity"])])
def test_what_is_ignored_is_named(shared, client, number, named):
    _, headers, _ = send(shared, RECORDED[client][number])
    assert all(name in headers["quantkit-ignored"] for name in named), headers


@pytest.mark.parametrize(("client", "number", "named"), [
    ("claude_code", 1, "context_management"), ("codex", 0, "client_metadata")])
def test_strict_requests_refuse_them(strict, client, number, named):
    status, _, text = send(strict, RECORDED[client][number])
    assert status == 400 and named in json.loads(text)["error"]["message"]


def test_recordings_have_no_sentences():
    """Only identifiers, sizes, and the calls that the recording's own server made."""
    def texts(value: Any, key: str = ""):
        if isinstance(value, dict):
            for name, item in value.items():
                yield from texts(item, name)
        elif isinstance(value, list):
            for item in value:
                yield from texts(item, key)
        elif isinstance(value, str) and key not in ("arguments", "input", "pattern"):
            yield value

    bodies = [request.get("body") for requests in RECORDED.values() for request in requests]
    assert not [text for text in texts(bodies) if " " in text]
