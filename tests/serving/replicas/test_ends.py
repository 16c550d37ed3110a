"""Replicas that end: killed under load, by a signal to the server, or because they can't load a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.helpers.processes import listening, marked
from tests.serving.replicas.conftest import KEY, MARK, MAX_BATCH, chat, greedy

pytestmark = pytest.mark.slow
HEADERS = {"Authorization": f"Bearer {KEY}"}
STREAMS, TOKENS = 24, 600
LOST = {"message": "the replica that was answering has ended; send the request again",
        "type": "server_error", "param": None, "code": "replica_lost"}


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


def test_a_killed_replica_loses_only_what_it_was_answering(replicated, loaded, eventually):
    with replicated(f"killed-{os.getpid()}") as server, \
            httpx.Client(base_url=server.where["url"], headers=HEADERS, timeout=120) as http:
        check_a_kill(server, http, loaded, eventually)


def check_a_kill(server, http, loaded, eventually):
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
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=3000, stream=True,
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


def test_answers_that_take_too_long_are_cut(replicated, eventually):
    mark = f"cut-{os.getpid()}"
    with replicated(mark, "--drain-timeout", 0.5) as process:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 60_000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", process.where["url"] + "/v1/completions", json=body, headers=HEADERS,
                          timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.child.send_signal(signal.SIGTERM)
            try:
                last = [line for line in lines if line][-2:]
            except httpx.RemoteProtocolError:  # it was closed
                last = []
        code, said = process.ended()
        assert code == 1 and "answers were cut off after 0.5 seconds" in said and "Traceback" not in said
        assert not last or (json.loads(last[0].removeprefix("data: "))["error"]["code"] == "shutting_down"
                            and last[1] == "data: [DONE]")
        eventually(lambda: not marked(MARK, mark))


def test_a_killed_server_leaves_nothing(replicated, eventually):
    mark = f"sigkill-{os.getpid()}"
    with replicated(mark) as process:
        environment = Path(f"/proc/{process.where['replicas'][0]['pid']}/environ").read_bytes().split(b"\0")
        (folder,) = (Path(line[11:].decode()) for line in environment if line.startswith(b"RAY_TMPDIR="))
        stream = process.client.with_options(api_key=KEY).completions.create(
            model="tiny", prompt="a", max_tokens=60_000, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert folder.is_dir()
        process.child.kill()
        killed = time.monotonic()
        eventually(lambda: not listening(marked(MARK, mark)))
        eventually(lambda: not marked(MARK, mark) and not folder.exists())
        print(f"all of it was gone after {time.monotonic() - killed:.1f} seconds")


def test_an_interrupted_start_leaves_no_process(replicated, folder, eventually):
    mark = f"interrupted-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-m", "quantkit.cli.main", "serve-local", folder,
                           "--replicas", "2", "--port", "0"], stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "2", MARK: mark}) as child:
        eventually(lambda: len(marked(MARK, mark)) > 2)  # the cluster's processes are being started
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "interrupted" in said and "Traceback" not in said
    eventually(lambda: not marked(MARK, mark))


def test_a_frozen_replica_is_left_out_of_the_state(replicated):
    with replicated(f"frozen-{os.getpid()}") as server, \
            httpx.Client(base_url=server.where["url"], headers=HEADERS, timeout=60) as http:
        frozen, other = server.where["replicas"]
        os.kill(frozen["pid"], signal.SIGSTOP)
        assert http.get("/ready").json()["max_batch"] == MAX_BATCH
        metrics = http.get("/metrics").text
        assert other["id"] in metrics and frozen["id"] not in metrics
        os.kill(frozen["pid"], signal.SIGCONT)
        assert http.get("/ready").json()["max_batch"] == 2 * MAX_BATCH


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
