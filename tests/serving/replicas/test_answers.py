"""Two replicas on a real cluster answer as one server does."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import anthropic
import httpx
import pytest

from tests.helpers.processes import LOOPBACK, listening, marked
from tests.serving.replicas.conftest import KEY, MARK, MAX_BATCH, chat, greedy

HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = "You are a careful assistant. " * 20


@pytest.fixture(scope="module")
def server(replicated):
    with replicated(f"shared-{os.getpid()}") as process:
        assert "url" in process.where, process.ended()
        yield process


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.where["url"], headers=HEADERS, timeout=120) as client:
        yield client


def test_it_says_who_the_replicas_are(server):
    ids = [replica["id"] for replica in server.where["replicas"]]
    assert len(set(ids)) == 2 and {replica["node"] for replica in server.where["replicas"]} == {"127.0.0.1"}
    for replica in server.where["replicas"]:
        assert b"ray::Replica" in Path(f"/proc/{replica['pid']}/cmdline").read_bytes()


def test_answers_are_those_of_one_server(server, http, loaded):
    names = set()
    client = server.client.with_options(api_key=KEY)
    claude = anthropic.Anthropic(base_url=server.where["url"], api_key=KEY, max_retries=0)
    for text in ("the cat", "a dog", "seven ships", "what is it"):
        messages, options = chat(text), {"model": "tiny", "max_tokens": 12, "temperature": 0}
        wanted = greedy(loaded, messages, 12)
        answer = http.post("/v1/chat/completions", json={"messages": messages, **options})
        assert answer.json()["choices"][0]["message"]["content"] == wanted
        names.add(answer.headers["x-quantkit-replica"])
        chunks = client.chat.completions.create(messages=messages, stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
        with claude.messages.stream(messages=messages, model="tiny", max_tokens=12,
                                    extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == wanted
    assert names == {replica["id"] for replica in server.where["replicas"]}


def test_the_rest_of_the_api_is_as_ever(http):
    assert http.get("/health", headers={"Authorization": ""}).status_code == 200
    assert http.get("/v1/models", headers={"Authorization": ""}).status_code == 401
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert http.get("/ready").json()["max_batch"] == 2 * MAX_BATCH
    assert http.post("/tokenize", json={"prompt": "the cat"}).json()["count"] > 0
    wrong = http.post("/v1/chat/completions", json={"model": "tiny", "messages": [], "max_tokens": 0})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"]
    assert http.get("/openapi.json").json()["components"]["securitySchemes"]
    assert "<html" in http.get("/").text and http.delete("/ready").status_code == 405
    lines = http.get("/metrics").text.splitlines()
    assert sum(line.startswith("vllm:num_requests_running{") for line in lines) == 2


def test_the_second_turn_of_every_conversation_is_cached(http):
    first: dict[int, str] = {}
    for turn in (chat, lambda text: chat(text, "Yes.", "And then?")):
        for number in range(8):
            answer = http.post("/v1/chat/completions", json={
                "model": "tiny", "max_tokens": 4, "messages": turn(f"Story {number}. {LONG}")})
            replica = answer.headers["x-quantkit-replica"]
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            if number in first:
                assert first[number] == replica and cached > 0
            first.setdefault(number, replica)
    assert sorted(Counter(first.values()).values()) == [4, 4]


def test_a_client_that_leaves_ends_its_request(http, eventually):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 60_000, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    eventually(lambda: http.get("/ready").json()["running"] == 0)


def test_nobody_else_can_use_what_it_started(server):
    addresses = listening(marked(MARK, f"shared-{os.getpid()}"))
    assert len(addresses) > 4 and set(addresses) <= LOOPBACK
    environment = Path(f"/proc/{server.where['replicas'][0]['pid']}/environ").read_text().split("\0")
    values = dict(line.split("=", 1) for line in environment if line)
    folder = Path(values["RAY_TMPDIR"])
    assert folder.stat().st_mode & 0o777 == 0o700 and values["RAY_AUTH_MODE"] == "token"
    token = values["RAY_AUTH_TOKEN"].encode()
    files = [*folder.rglob("*"), Path.home() / ".ray" / "auth_token"]
    assert len(token) == 64 and not any(token in file.read_bytes() for file in files if file.is_file())
