"""Tokens' texts and log-probabilities in both APIs' words."""

import math

import pytest

from quantkit.runtime.core import TokenInfo
from quantkit.serving.models import TokenTexts
from quantkit.serving.openai.logprobs import TextOffsets, chat_logprobs, text_logprobs


@pytest.fixture(scope="module")
def texts(loaded):
    return TokenTexts(loaded.tokenizer)


def test_texts_of_single_tokens_join_to_the_text(texts, loaded):
    for text in ("the cat in the hat", " two  spaces", "naïve 猫 🙂", "<|im_end|> <s>"):
        ids = loaded.tokenizer.encode(text, special=False)
        pieces = [texts.text(token) for token in ids]
        if "\ufffd" not in "".join(pieces):
            assert "".join(pieces) == text
            assert b"".join(bytes(texts.bytes(token)) for token in ids).decode() == text


def test_a_part_of_a_character_has_no_bytes(texts, loaded):
    ids = loaded.tokenizer.encode("猫", special=False)
    assert len(ids) > 1 and all(texts.bytes(token) is None for token in ids)


def test_of_tokens_that_look_alike_the_likeliest_stays(texts, loaded):
    one, two = loaded.tokenizer.encode("猫", special=False)[:2]
    assert texts.text(one) == texts.text(two)
    out = text_logprobs([TokenInfo(two, "", -3.0, ((one, -0.5), (two, -3.0)))], texts, nowhere(loaded))
    assert out["top_logprobs"] == [{texts.text(one): -0.5}]


def test_minus_infinity_is_a_number_that_json_has(texts, loaded):
    info = TokenInfo(5, "", -math.inf, ((6, -1.0), (5, -math.inf)))
    assert chat_logprobs([info], texts)["content"][0]["logprob"] == -9999.0
    assert text_logprobs([info], texts, nowhere(loaded))["token_logprobs"] == [-9999.0]


def nowhere(loaded):
    return TextOffsets(loaded.tokenizer)


def offsets_of(loaded, text, shown=None):
    tokenizer = loaded.tokenizer
    ids, answer = tokenizer.encode(text), tokenizer.encode(" on", special=False)
    assert ids[0] == tokenizer.bos_id
    offsets = TextOffsets(tokenizer, ids, text if shown is None else shown)
    return ids, [offsets.push(token) for token in [*ids, *answer]]


@pytest.mark.parametrize("text", ["the cat sat", "  the </s>in", ""])
def test_offsets_are_those_of_the_text_that_is_shown(texts, loaded, text):
    ids, offsets = offsets_of(loaded, text)
    lengths = [0, *(len(texts.text(token)) for token in ids[1:])]
    assert offsets[:len(ids) + 1] == [sum(lengths[:i]) for i in range(len(ids) + 1)]
    assert offsets[len(ids)] == len(text)


def test_a_part_of_a_character_begins_where_it_does(loaded):
    ids, offsets = offsets_of(loaded, "a猫b")
    assert len(ids) > 4 and offsets[:2] == [0, 0] and set(offsets[2:len(ids) - 1]) == {1}
    assert offsets[len(ids) - 1:len(ids) + 1] == [2, 3]
