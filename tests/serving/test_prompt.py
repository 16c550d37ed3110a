"""Texts that are far too long are refused before much is done about them."""

import pytest
from tokenizers import normalizers

from quantkit.runtime.core import ContextLengthError
from quantkit.serving import work
from quantkit.serving.errors import ApiError
from quantkit.serving.work import PromptReader
from quantkit.testing import tiny_tokenizer
from quantkit.text import library
from quantkit.text.tokenizer import Tokenizer

from .conftest import CHAT, TEXT


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of texts that any tokenizer was given."""
    lengths, encode = [], library.encode
    monkeypatch.setattr(library, "encode", lambda inner, text, special: lengths.append(len(text)) or encode(
        inner, text, special))
    return lengths


def tokenizer_of(*, normalizer=None):
    made = tiny_tokenizer()
    if normalizer is not None:
        made.normalizer = normalizer
    return Tokenizer({"tokenizer.json": made.to_str().encode()}, {})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [
    {"prompt": "1" * 4_000_000}, {"prompt": ["a", "1" * 4_000_000]}, {"prompt": " " * 4_000_000},
    {"prompt": "1" * 4_000_000, "echo": True, "logprobs": 3, "max_tokens": 0},
    {"prompt": "1" * 4_000_000, "stream": True}, {"prompt": "é" * 1_900_000},
    {"messages": [{"role": "user", "content": "1" * 4_000_000}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "1" * 2_000_000}] * 2}],
     "stream": True},
    {"messages": [{"role": "user", "content": "1" * 400_000}] * 10},
])
def test_a_text_that_cant_fit_is_refused_without_being_encoded(shared, encoded, body):
    answer = shared.post(CHAT if "messages" in body else TEXT, body)
    assert answer.status_code == 400, answer.text
    error, context = answer.json()["error"], shared.loaded.config.max_position_embeddings
    assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "messages")
    assert f"context length is {context} tokens" in error["message"] and "at least " in error["message"]
    assert sum(encoded) <= 1
    assert shared.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_what_fits_is_never_refused_by_its_length(monkeypatch):
    monkeypatch.setattr(work, "HEAD_CHARACTERS", 50)
    tokenizer = tokenizer_of()
    longest = "<|endoftext|>"  # the token of the most bytes
    for text in (longest * 99, " the" * 99, "1" * 99, "é" * 49):
        ids = tokenizer.encode(text)
        assert PromptReader(tokenizer, len(ids) + 1, 1, "prompt").encode(text) == ids
        with pytest.raises((ContextLengthError, ApiError)):
            PromptReader(tokenizer, len(ids), 1, "prompt").encode(text)


def test_beginnings_show_that_a_text_of_short_tokens_is_too_long(encoded):
    tokenizer = tokenizer_of(normalizer=normalizers.Strip())
    assert tokenizer.least_tokens("1" * 10**6) == 0, "its length says nothing"
    with pytest.raises(ApiError, match=r"more than 8192 \(its first 65536 characters have 65536\)") as caught:
        PromptReader(tokenizer, 8192, 1, "prompt").encode("1" * 10**6)
    assert caught.value.code == "context_length_exceeded" and sum(encoded) == 65536
    text = " " * 10**6 + "the cat"
    assert PromptReader(tokenizer, 8192, 1, "prompt").encode(text) == tokenizer.encode("the cat")


def test_of_many_prompts_none_is_encoded_after_one_that_is_too_long(shared, encoded):
    context = shared.loaded.config.max_position_embeddings
    answer = shared.post(TEXT, {"prompt": ["1" * (context + 10), *["the cat"] * 9]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert encoded == [context + 10]
