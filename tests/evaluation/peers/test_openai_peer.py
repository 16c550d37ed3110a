"""A server as a row: ours, and servers that answer as others do or misbehave."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from quantkit.evaluation.peers.run import PeerSpeedSettings
from quantkit.evaluation.quality.score import compare
from quantkit.serving.models import TokenTexts
from quantkit.support.errors import QuantkitError, UsageError
from tests.helpers.server_process import Process

from .conftest import run_peer

SPEED = PeerSpeedSettings(prefill=8, decode=3, repeats=2, threads=1)


class FakeServer:
    """What a server answers, by its own tokens and logits: those of the reference, exactly.

    Args:
        reference: loaded model.
        kind: ``vllm``: ``prompt_logprobs`` by id. ``text``: takes texts only, and echoes. ``bos``: as that,
            and puts a token first. ``silent``: completes, but tells nothing of the prompt.
    """

    def __init__(self, reference, kind):
        self.reference = reference
        self.kind = kind
        self.bodies = []

    def get(self, path):
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "owned_by": self.kind}]}
        return (200, {"version": "1.2"}) if path == "/version" else (404, {"error": {"message": "no"}})

    def post(self, path, body):
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        self.bodies.append(body)
        tokenizer, prompt = self.reference.tokenizer, body["prompt"]
        if self.kind == "silent":
            return 200, {"choices": [choice_of()]}
        if self.kind in ("text", "bos"):
            if not isinstance(prompt, str):
                return 400, {"error": {"message": "prompt must be a string"}}
            prompt = tokenizer.encode(prompt, special=False)
        ids = [0, *prompt] if self.kind == "bos" else prompt
        choice = choice_of()
        logits = self.reference.model(torch.tensor([ids]))[0].log_softmax(-1)
        if self.kind == "vllm" and body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(row[token]), "rank": 5},
                 str(int(row.argmax())): {"logprob": float(row.max()), "rank": 1}}
                for token, row in zip(ids[1:], logits)]
        elif self.kind in ("text", "bos") and body.get("echo"):
            texts = TokenTexts(tokenizer)
            best = [{texts.text(int(row.argmax())): float(row.max())} for row in logits]
            choice["logprobs"] = {
                "tokens": [texts.text(token) for token in ids], "top_logprobs": [None, *best],
                "token_logprobs": [None] + [float(row[token]) for token, row in zip(ids[1:], logits)]}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}


def choice_of():
    return {"index": 0, "text": "x", "logprobs": None}


@contextmanager
def serving(answers):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(*answers.get(self.path))

        def do_POST(self):
            self.reply(*answers.post(self.path, json.loads(self.rfile.read(int(
                self.headers["Content-Length"])))))

        def reply(self, status, body):
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_our_own_server_gives_our_own_perplexity(folder, reference, windows):
    with Process((folder, "--port", 0)) as process:
        url = process.where["url"]
        peer = f"openai({url}/v1, model={process.where['model']})"
        row = run_peer(peer, {"one": windows}, 4, reference, SPEED)
        with pytest.raises(UsageError, match="serves no 'other'"):
            run_peer(f"openai({url}, model=other)", {"one": windows}, 4, reference)
    local = run_peer(f"transformers({folder})", {"one": windows}, 4, reference)
    assert row.metrics["perplexity"].value == pytest.approx(local.metrics["perplexity"].value, rel=1e-4)
    assert row.tool == "quantkit" and "kl_mean" not in row.metrics and row.metrics["prefill_tok_s"].value > 0
    assert (row.bits_per_weight, row.file_bytes, row.peak_bytes, row.load_s) == (None, None, None, None)
    assert row.speed.memory is None and row.speed.prefill[0].first_token_s.median > 0


def test_vllm_names_the_likeliest_token_by_its_id(reference, windows):
    with serving(FakeServer(reference, "vllm")) as url:
        row = run_peer(f"openai({url})", {"one": windows}, 0, reference)
    (ours,) = compare([reference], windows)
    assert row.tool == "vllm 1.2" and row.method == "m"
    assert row.metrics["perplexity"].value == pytest.approx(ours["perplexity"].value, rel=1e-5)
    assert row.metrics["top1"].value == 1 and set(row.metrics) == {"perplexity", "top1", "flips"}


def test_a_server_that_takes_texts_only(reference, windows):
    server = FakeServer(reference, "text")
    with serving(server) as url:
        row = run_peer(f"openai({url})", {"one": windows}, 0, reference)
    (ours,) = compare([reference], windows)
    assert row.metrics["perplexity"].value == pytest.approx(ours["perplexity"].value, rel=1e-5)
    assert [type(body["prompt"]) for body in server.bodies] == [list] * 3 + [str] * 3


def test_a_server_that_reads_other_tokens_is_refused(reference, windows):
    with serving(FakeServer(reference, "bos")) as url, pytest.raises(UsageError, match="has 25 there"):
        run_peer(f"openai({url})", {"one": windows}, 0, reference)


def test_what_a_server_does_not_tell_is_blank(reference, windows):
    with serving(FakeServer(reference, "silent")) as url:
        row = run_peer(f"openai({url})", {"one": windows}, 0, reference)
    assert row.metrics == row.texts == row.window_means == {}


class Broken(FakeServer):
    """One that answers every completion alike."""

    def __init__(self, reference, status, body):
        super().__init__(reference, "broken")
        self.answer = status, body

    def post(self, path, body):
        return self.answer


@pytest.mark.parametrize(("status", "body", "words"), [
    (500, {"error": {"message": "out of memory"}}, "out of memory"),
    (401, {"error": "no key"}, "no key"), (302, {}, "HTTP 302"),
    (200, b"<html>", "the answer of"),
    (200, b'{"choices": ' + b"[" * 100 + b"]" * 100 + b"}", "the answer of")])
def test_a_server_that_misbehaves_is_told(reference, windows, status, body, words):
    with serving(Broken(reference, status, body)) as url, pytest.raises(QuantkitError, match=words):
        run_peer(f"openai({url})", {"one": windows}, 0, reference)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://user:key@127.0.0.1",
                                 "http://127.0.0.1:99999", "file:///etc/passwd"])
def test_what_is_no_server_is_refused(reference, windows, url):
    with pytest.raises(UsageError, match=r"not (the URL of a server|a URL)"):
        run_peer(f"openai({url})", {"one": windows}, 0, reference)


def test_nobody_is_there(reference, windows):
    with pytest.raises(QuantkitError, match="can't be asked"):
        run_peer("openai(http://127.0.0.1:1)", {"one": windows}, 0, reference)


def test_a_key_comes_from_the_environment(reference, windows, monkeypatch):
    with pytest.raises(UsageError, match="PEER_KEY"):
        run_peer("openai(http://127.0.0.1:1, key_env=PEER_KEY)", {"one": windows}, 0, reference)
    seen = []

    class Keyed(FakeServer):
        def get(self, path):
            seen.append(path)
            return super().get(path)

    monkeypatch.setenv("PEER_KEY", "secret")
    with serving(Keyed(reference, "silent")) as url:
        row = run_peer(f"openai({url}, key_env=PEER_KEY)", {"one": windows}, 0, reference)
    assert seen and "secret" not in json.dumps(row.to_dict())
