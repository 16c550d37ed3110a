"""``quantkit serve-local`` as a process: it starts, says where it is, and ends as it should."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from quantkit.cli.main import main
from quantkit.cli.serve.command import _keys, _names, _template
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.serving.address import model_name
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model
from tests.helpers.server_process import Process

ENDLESS = {"prompt": "a", "max_tokens": 60_000, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="session")
def long(tmp_path_factory):
    """A model with room for answers that take a while."""
    return tiny_model(tmp_path_factory.mktemp("models") / "long", dtype="float32",
                      max_position_embeddings=2**16)


@pytest.fixture
def serving() -> Iterator[Callable[..., Any]]:
    """``with serving(model, …) as process``: killed at the end, if it is still there."""

    @contextmanager
    def start(*arguments: object, **environment: str) -> Iterator[Process]:
        with Process(("--port", 0, *arguments), **environment) as process:
            yield process

    yield start


def test_it_serves_says_where_and_ends_when_told(serving, checkpoint):
    with serving(checkpoint, "--max-batch", 2, "--name", "mine") as process:
        assert process.where["model"] == "mine" and process.where["pid"] == process.child.pid
        loaded = load(str(checkpoint))
        wanted = generate(loaded, [loaded.tokenizer.encode("the cat")], Sampling(max_tokens=9))[0].text
        assert process.ask(prompt="the cat", max_tokens=9, temperature=0).choices[0].text == wanted
        assert process.get("/ready").json()["max_batch"] == 2
        process.child.send_signal(signal.SIGTERM)
        code, said = process.ended()
    assert code == 0 and "Traceback" not in said
    assert "rtn int8" in said and process.where["url"] in said and "KV cache none" in said
    assert "all answers are complete" in said
    # the last line can be pasted
    (line,) = (line for line in said.splitlines() if line.startswith("next: "))
    words = shlex.split(line.removeprefix("next: "))
    assert words[:2] == ["curl", process.where["url"] + "/v1/chat/completions"]
    assert words[2:5] == ["-H", "Content-Type: application/json", "-d"]
    assert json.loads(words[5]) == {"model": "mine", "max_tokens": 64,
                                    "messages": [{"role": "user", "content": "Hello"}]}


def test_blocks_are_for_the_models_that_write_them(serving, tmp_path, long):
    written = tiny_model(tmp_path / "written", "sdar", dtype="float32")
    with serving(written, long, "--blocks", "2") as process:
        for model in ("written", "long"):
            answer = process.client.completions.create(model=model, prompt="the cat", max_tokens=9)
            assert answer.usage.completion_tokens
        process.child.send_signal(signal.SIGTERM)
        assert process.ended()[0] == 0
    other = tiny_model(tmp_path / "other", seed=2)
    with pytest.raises(UsageError, match="none of these models writes blocks"):
        main.main(["serve-local", str(long), str(other), "--blocks", "2"], standalone_mode=False)


def test_a_signal_lets_streams_reach_their_end(serving, long):
    with serving(long) as process:
        stream = process.ask(**{**ENDLESS, "max_tokens": 600})
        next(iter(stream))
        process.child.send_signal(signal.SIGTERM)
        # refused from the moment that it is seen, while the stream still runs
        while (ready := process.get("/ready")).status_code == 200:
            pass
        assert ready.status_code == 503 and ready.json()["error"]["code"] == "shutting_down"
        with pytest.raises(openai.InternalServerError):
            process.ask(prompt="a")
        last = list(stream)[-1]
        assert last.choices[0].finish_reason == "length"
        code, said = process.ended()
    assert code == 0 and "finishing 1 answer" in said and "Traceback" not in said


def test_a_second_signal_stops_at_once(serving, long):
    with serving(long, "--kv", "window(64, sinks=4)+int8", "--dtype", "bfloat16") as process:
        (model,) = process.get("/v1/models").json()["data"]
        assert (model["kv"], model["dtype"]) == ("window(64, sinks=4)+int8", "bfloat16")
        stream = process.ask(**ENDLESS)
        next(iter(stream))
        process.child.send_signal(signal.SIGINT)
        while process.get("/ready").status_code == 200:
            pass
        process.child.send_signal(signal.SIGINT)
        code, said = process.ended()
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            list(stream)
    assert code == 130 and "interrupted" in said and "Traceback" not in said


def test_what_takes_too_long_is_cut_off_and_said(serving, long):
    with serving(long, "--drain-timeout", "0.1") as process:
        stream = process.ask(**ENDLESS)
        next(iter(stream))
        process.child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        code, said = process.ended()
    assert code == 1 and "cut off after 0.1 seconds" in said and "--drain-timeout" in said


def test_with_a_key_others_may_reach_it(serving, tiny):
    with serving(tiny, "--host", "0.0.0.0", QUANTKIT_API_KEY="sesame-1234") as process:
        assert process.get("/v1/models").status_code == 401 and process.get("/health").status_code == 200
        assert process.client.with_options(api_key="sesame-1234").models.list().data[0].id == "tiny"
        process.child.send_signal(signal.SIGTERM)
        code, said = process.ended()
    assert code == 0 and "sesame" not in said and '"Authorization: Bearer $QUANTKIT_API_KEY"' in said
    assert "for other machines" in said


def test_chats_by_a_template_of_its_own(serving, long, tmp_path):
    template = tmp_path / "turns.jinja"
    template.write_text("{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with serving(long, "--chat-template", template) as process:
        answer = process.client.chat.completions.create(
            model=process.where["model"], messages=[{"role": "user", "content": "the cat"}], max_tokens=6,
            temperature=0)
        wanted = process.ask(prompt="[the cat]", max_tokens=6, temperature=0).choices[0].text
    assert answer.choices[0].message.content == wanted


@pytest.mark.parametrize(("text", "why"), [("{% for", "Unexpected|unexpected|expected"),
                                           ("a" * (128 * 2**10 + 1), "131072 are allowed")])
def test_a_chat_template_that_is_none(tmp_path, text, why):
    file = tmp_path / "turns.jinja"
    file.write_text(text)
    with pytest.raises(UsageError, match="can't be a chat template") as caught:
        _template(file)
    assert re.search(why, caught.value.why) and caught.value.next


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["--host", "0.0.0.0"], 2, "there is no API key"), (["--host", "no.such.invalid"], 2, "can't be bound"),
    (["--port", "99999"], 2, "--port"), (["--kv", "int9"], 2, "int9"),
    (["--max-batch", "0"], 2, "--max-batch"),
    (["--name", ""], 2, "can't be called"), (["--api-key-file", "nowhere"], 1, "nowhere"),
    (["--chat-template", "nowhere"], 1, "nowhere"),
    (["--dtype", "int8"], 2, "--dtype"), (["--max-queue", "0"], 2, "--max-queue"),
    (["--kv-memory", "8"], 2, "8GB"), (["--trace", "no/folder/trace.json"], 2, "the trace can't be written"),
    (["--trace", "trace.json", "--replicas", "2"], 2, "--trace doesn't go with --replicas"),
])
def test_what_cant_be_is_refused_before_the_model_is_loaded(cli, tiny, arguments, code, said):
    result = cli("serve-local", tiny, "--port", 0, *arguments)
    assert result.exit_code == code
    assert said in result.stderr and "Traceback" not in result.stderr and "loading" not in result.stderr


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_its_trace_is_complete_however_it_ends(serving, long, tmp_path, signals):
    path = tmp_path / "trace.json"
    with serving(long, "--name", "mine", "--trace", path) as process:
        names = [process.ask(prompt="the cat", max_tokens=9, n=n).id for n in (1, 2)]
        stream = process.ask(**ENDLESS | ({"max_tokens": 50} if signals == 1 else {}))
        names.append(next(iter(stream)).id)
        process.child.send_signal(signal.SIGINT)
        if signals == 1:
            assert len(list(stream)) > 1
        else:
            while process.get("/ready").status_code == 200:
                pass
            process.child.send_signal(signal.SIGINT)
        code, _ = process.ended()
    assert code == (0 if signals == 1 else 130)
    events = json.loads(path.read_text())
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"steps of the engine", names[0], f"{names[1]} choice 0", f"{names[1]} choice 1",
                       names[2]}
    ends = [event["args"]["reason"] for event in events if event["name"] == "end"]
    assert len(ends) == 4 and ends[-1] == ("length" if signals == 1 else "cancelled")
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["mine"]


def test_a_kv_cache_that_is_too_small(cli, tiny):
    result = cli("serve-local", tiny, "--port", 0, "--kv-memory", "1kB")
    assert result.exit_code == 2 and "too few for the KV cache" in result.stderr


def test_random_weights_have_text_and_a_kv_cache_of_a_fixed_size(serving):
    with serving("synthetic:tiny", "--random", "int8", "--kv-memory", "1MB", "--max-batch", 2) as process:
        answer = process.ask(prompt="the cat", max_tokens=9, temperature=0, extra_body={"ignore_eos": True})
        process.child.send_signal(signal.SIGTERM)
        code, said = process.ended()
    assert answer.usage.completion_tokens == 9 and len(answer.choices[0].text) >= 9
    assert code == 0 and "loaded random int8" in said and re.search(r"taken, for [\d,]+ tokens", said)


def test_a_port_in_use(cli, tiny):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = cli("serve-local", tiny, "--port", other.getsockname()[1])
    assert result.exit_code == 1 and "loading" not in result.stderr
    for part in ("error: port", "why: another program", "next: add --port 0"):
        assert part in result.stderr


def test_a_model_that_is_not_there(cli, tmp_path):
    result = cli("serve-local", tmp_path / "nothing", "--port", 0)
    assert result.exit_code == 1 and "doesn't exist" in result.stderr


@pytest.mark.parametrize(("model", "name", "called"), [
    ("smollm2", None, "smollm2"), ("org/model", None, "model"), ("org/model@main", None, "model"),
    ("hf://org/model", None, "model"), ("a/b/", None, "b"), ("x", "org/y", "org/y"),
    ("synthetic:llama-8b", None, "synthetic:llama-8b"),
])
def test_what_the_model_is_called(model, name, called):
    assert model_name(model, name) == called


def test_a_folder_is_called_by_its_own_name(tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    assert model_name(".", None) == tiny.name


@pytest.mark.parametrize("raw", [b"", b" \n", b"a b", b"\xff", b"a\x00b", b"one\ntwo three", b"a\n" * 40_000])
def test_a_key_that_cant_be_sent(tmp_path, raw):
    file = tmp_path / "key"
    file.write_bytes(raw)
    with pytest.raises(UsageError, match="can't be used"):
        _keys(file)


def test_where_the_key_comes_from(monkeypatch, tmp_path):
    file = tmp_path / "key"
    file.write_text("from-a-file\r\n\n another-one \n")
    monkeypatch.delenv("QUANTKIT_API_KEY", raising=False)
    assert _keys(None) == []
    monkeypatch.setenv("QUANTKIT_API_KEY", "from-outside")
    assert (_keys(None), _keys(file)) == (["from-outside"], ["from-a-file", "another-one"])


def test_its_help_imports_no_server():
    done = subprocess.run([sys.executable, "-c", "import quantkit.cli.serve.command, sys; print([m for m in ("
                           "'torch', 'fastapi', 'uvicorn') if m in sys.modules])"],
                          capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]" and "serve-local" in main.list_commands(None)


def test_several_models_each_under_its_name(serving, checkpoint, long):
    with serving(checkpoint, long, "--name", "first", "--name", "second") as process:
        assert process.where["model"] == "first" and process.where["models"] == ["first", "second"]
        assert [model.id for model in process.client.models.list()] == ["first", "second"]
        for name, model in (("first", checkpoint), ("second", long)):
            loaded = load(str(model))
            wanted = generate(loaded, [loaded.tokenizer.encode("the cat")], Sampling(max_tokens=9))[0].text
            answer = process.client.completions.create(model=name, prompt="the cat", max_tokens=9,
                                                       temperature=0)
            assert answer.choices[0].text == wanted
        process.child.send_signal(signal.SIGTERM)
        assert process.ended()[0] == 0


@pytest.mark.parametrize(("names", "problem"), [(("a",), "2 models and 1 names"), (("a", "a"), "same name"),
                                                ((), "same name")])
def test_names_that_do_not_fit(names, problem):
    with pytest.raises(UsageError, match=problem):
        _names(("x/model", "y/model"), names)


def test_replicas_without_ray_name_the_remedy(cli, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = cli("serve-local", tiny, "--port", 0, "--replicas", 2)
    assert result.exit_code == 1 and "--replicas needs Ray" in result.stderr
    assert 'pip install ray' in result.stderr and "Traceback" not in result.stderr
