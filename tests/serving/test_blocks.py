"""A server whose model writes blocks: it streams each as it is complete, beside a model that doesn't."""

from __future__ import annotations

import pytest

from quantkit.runtime.loader import load
from tests.models.test_block_diffusion import diffusing

from .conftest import APIS, CHAT, MESSAGES, RESPONSES, TEXT, asked
from .test_trace import ended, spans, trace


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return load(str(diffusing(tmp_path_factory.mktemp("blocks") / "m", "sdar", 4, dtype="float32",
                              max_position_embeddings=512)))


def text_of(stream):
    return [part.choices[0].text for part in stream if part.choices and part.choices[0].text]


@pytest.mark.parametrize("path", APIS)
def test_every_api_answers_alike_streamed_or_not(live, blocks, path):
    made = live(loaded=blocks)
    body = asked(path, most=11)
    whole, streamed = (made.post(path, body | {"temperature": 0, "stream": stream})
                       for stream in (False, True))
    assert whole.status_code == streamed.status_code == 200 and "event: error" not in streamed.text
    usage = whole.json()["usage"]
    assert 0 < usage.get("completion_tokens", usage.get("output_tokens")) <= 11


def test_blocks_are_streamed_beside_a_model_that_writes_token_by_token(live, blocks, loaded, eventually):
    made = live(models={"blocks": blocks, "tiny": loaded}, loaded=blocks)
    client, request = made.openai(), {"prompt": "the cat sat", "max_tokens": 24, "temperature": 0,
                                      "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="blocks", **request)
    with client.completions.create(model="blocks", stream=True, **request) as stream:
        parts = text_of(stream)
        with client.completions.create(model="tiny", stream=True, **request) as other:
            assert len(text_of(other)) > 1
    assert "".join(parts) == whole.choices[0].text and whole.usage.completion_tokens == 24
    details = whole.usage.completion_tokens_details
    assert details is None or not details.rejected_prediction_tokens, "masks are no predictions"
    eventually(ended(made, 3))
    (model, plain) = trace(made)["models"]
    assert (model["stats"]["block_size"], plain["stats"]["block_size"]) == (4, 1)
    steps = [span for span in spans(trace(made), whole.id) if span["kind"] == "decode"]
    assert sum(span["tokens"] for span in steps) == 24
    assert all(0 < span["accepted"] <= span["drafted"] <= 4 for span in steps)
    assert any(span["tokens"] == 0 for span in steps), "a step commits tokens before its block is complete"


@pytest.mark.parametrize(("path", "more", "words"), [
    (CHAT, {"logprobs": True}, "log-probabilities"),
    (TEXT, {"logprobs": 1}, "log-probabilities"),
    (TEXT, {"echo": True, "logprobs": 0}, "log-probabilities"),
    (CHAT, {"response_format": {"type": "json_object"}}, "structured"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
            "tool_choice": "required"}, "tool calls"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "structured"),
    (MESSAGES, {"tools": [{"name": "look", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"}}, "tool calls"),
    ("/v1/embeddings", None, "embeddings")])
def test_what_blocks_have_not_is_refused(live, blocks, path, more, words):
    made = live(loaded=blocks)
    answer = made.post(path, {"input": "the cat"} if more is None else asked(path) | more)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert made.post(TEXT, asked(TEXT)).status_code == 200
