"""Two replicas on a real cluster: they answer as one server does, and one of them is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import anthropic
import httpx
import pytest

from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from tests.serve.replicas.conftest import KEY, MARK, MAX_BATCH
from tests.support.processes import LOOPBACK, listening, marked

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="processes are read from /proc")]
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = "You are a careful assistant. " * 20
STREAMS, TOKENS = 24, 600
LOST = {"message": "the replica that was answering has ended; send the request again",
        "type": "server_error", "param": None, "code": "replica_lost"}


@pytest.fixture(scope="module")
def server(replicated):
    with replicated(f"shared-{os.getpid()}") as process:
        assert "url" in process.where, process.ended()
        yield process


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.where["url"], headers=HEADERS, timeout=120) as client:
        yield client


def chat(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def greedy(loaded, messages, count):
    ids = loaded.tokenizer.chat(messages)
    return generate(loaded, [ids], Sampling(max_tokens=count))[0].text


def test_it_says_who_the_replicas_are(server):
    ids = [replica["id"] for replica in server.where["replicas"]]
    assert len(set(ids)) == 2 and {replica["node"] for replica in server.where["replicas"]} == {"127.0.0.1"}
    for replica in server.where["replicas"]:
        assert b"ServeReplica" in Path(f"/proc/{replica['pid']}/cmdline").read_bytes()


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


def test_all_of_it_listens_on_the_loopback_address_only(server):
    addresses = listening(marked(MARK, f"shared-{os.getpid()}"))
    assert len(addresses) > 6
    assert set(addresses) <= LOOPBACK


@dataclass
class Stream:
    """A streamed answer as its client sees it."""

    messages: list[dict[str, str]]
    anthropic: bool
    replica: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def error(self) -> dict[str, object] | None:
        return next((json.loads(event)["error"] for event in self.events
                     if event != "[DONE]" and "error" in json.loads(event)), None)


async def follow(client, stream):
    path = "/v1/messages" if stream.anthropic else "/v1/chat/completions"
    body = {"model": "tiny", "messages": stream.messages, "max_tokens": TOKENS, "temperature": 0,
            "stream": True}
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        stream.replica = answer.headers["x-quantkit-replica"]
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                stream.events.append(line.removeprefix("data: "))


def written(event):
    """The text in an event of either API."""
    if event == "[DONE]":
        return ""
    values = json.loads(event)
    deltas = [choice["delta"].get("content") for choice in values.get("choices", ())]
    return "".join(filter(None, [*deltas, values.get("delta", {}).get("text")]))


async def kill_under_load(server, streams):
    """Send all streams, end one replica's process once it has begun some and others wait for it."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.where["url"], headers=HEADERS, timeout=300,
                                 limits=limits) as client:
        running = [asyncio.create_task(follow(client, stream)) for stream in streams]
        victim = server.where["replicas"][0]
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            waiting = [float(line.split()[-1]) for line in lines
                       if line.startswith("vllm:num_requests_waiting{") and victim["id"] in line]
            begun = {stream.anthropic for stream, task in zip(streams, running, strict=True)
                     if stream.replica == victim["id"] and not task.done()}
            if len(begun) == 2 and waiting[0] > 0:
                break
            assert not all(task.done() for task in running)
        os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.gather(*running)
    return victim["id"], int(waiting[0])


def test_a_killed_replica_loses_only_what_it_was_answering(server, http, loaded, eventually):
    streams = [Stream(chat(f"{number} ways to write, number {number}"), anthropic=number // 2 % 2 == 1)
               for number in range(STREAMS)]
    wanted = [greedy(loaded, stream.messages, TOKENS) for stream in streams]
    killed, waiting = asyncio.run(kill_under_load(server, streams))
    for stream, text in zip(streams, wanted, strict=True):
        answered = "".join(map(written, stream.events))
        if stream.error is None:
            assert answered == text
            continue
        assert stream.replica == killed and answered != text and text.startswith(answered)
        if stream.anthropic:
            assert stream.error == {"type": "overloaded_error", "message": LOST["message"]}
        else:
            assert stream.error == LOST and stream.events[-1] == "[DONE]"
    lost = [stream for stream in streams if stream.error is not None]
    by_api = Counter("Anthropic" if stream.anthropic else "OpenAI" for stream in lost)
    print(f"{STREAMS} streams, {killed} killed with {waiting} requests waiting: {len(lost)} ended with the "
          f"error ({dict(by_api)}), all of {killed}; {STREAMS - len(lost)} complete and right")
    assert len(by_api) == 2 and len(lost) <= MAX_BATCH
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": chat("the cat"),
                                                     "max_tokens": 12, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"] == greedy(loaded, chat("the cat"), 12)
    eventually(lambda: http.get("/ready").json()["max_batch"] == 2 * MAX_BATCH)
    assert killed not in http.get("/metrics").text, "another one has taken its place"


def test_a_signal_lets_answers_end_and_leaves_no_process(replicated, loaded, eventually):
    mark = f"ends-{os.getpid()}"
    with replicated(mark) as process:
        client = process.client.with_options(api_key=KEY)
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=400, stream=True,
                                           temperature=0, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert len(marked(MARK, mark)) > 4
        process.child.send_signal(signal.SIGINT)
        eventually(lambda: process.get("/health").status_code == 200 and httpx.get(
            process.where["url"] + "/ready", headers=HEADERS).status_code == 503)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        code, said = process.ended()
        assert code == 0 and "all answers are complete" in said and "Traceback" not in said
        eventually(lambda: not marked(MARK, mark))


def test_a_model_that_can_t_be_loaded_is_told_as_ever(replicated, folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    mark = f"broken-{os.getpid()}"
    with replicated(mark, model=broken) as process:
        code, said = process.ended()
    assert code == 1 and "has no weights" in said and "next: " in said and "Traceback" not in said
