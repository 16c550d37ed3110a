"""One request: what a token's arrival shows, how it ends, and what its listener hears."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.runtime.core import LOGPROB_ROWS, ContextLengthError, Request, TokenInfo, check_request
from quantkit.runtime.sampler import Sampling, sample_tokens
from quantkit.structure.base import ConstraintError
from quantkit.support.errors import UsageError


def logits_for(token, size=300):
    row = torch.zeros(size)
    row[token] = 9.0
    return row


def encode(loaded, text):
    return loaded.tokenizer.encode(text, special=False)


def feed(loaded, ids, **options):
    """A request through which these ids go; and all that was heard."""
    heard = []
    options = {"ignore_eos": True, "max_tokens": len(ids) + 5} | options
    request = Request(0, loaded, [5, 6], Sampling(**options), on_token=heard.append,
                     on_done=lambda request: heard.append(request.result.finish_reason))
    for token in ids:
        if not request.done:
            request.append(token, logits_for(token))
    return request, heard


@pytest.mark.parametrize("text", ["the thing in the other", "naïve 😀 text", "日本語", "a"])
def test_the_pieces_are_the_text_and_no_character_is_cut(loaded, text):
    ids = encode(loaded, text)
    request, heard = feed(loaded, ids, max_tokens=len(ids))
    assert heard.pop() == "length" == request.result.finish_reason and request.done
    assert [info.id for info in heard] == ids == request.result.token_ids
    assert "".join(info.text for info in heard) == text == request.result.text
    assert not any("\ufffd" in info.text for info in heard)


def test_an_unfinished_character_comes_out_at_the_end(loaded):
    ids = encode(loaded, "x😀")[:-1]
    request, heard = feed(loaded, ids, max_tokens=len(ids))
    assert request.result.text == loaded.tokenizer.decode(ids) == "".join(info.text for info in heard[:-1])
    assert request.result.text.startswith("x") and "\ufffd" in request.result.text


@pytest.mark.parametrize("cut", range(1, 8))
def test_text_before_the_end_token_is_flushed_with_it(loaded, cut):
    ids = encode(loaded, "one 😀 two")[:cut]
    request, heard = feed(loaded, [*ids, 3, 7], ignore_eos=False)
    assert heard.pop() == "stop" == request.result.finish_reason
    assert request.result.token_ids == [*ids, 3] and request.result.text == loaded.tokenizer.decode(ids)
    assert "".join(info.text for info in heard) == request.result.text


@pytest.mark.parametrize(("stop", "shown"), [
    (("e f",), "abc d"), (("abc",), ""), (("zzz", "f g"), "abc de "), (("g",), "abc de f "),
    (("c d", "d"), "ab")])
def test_a_stop_string(loaded, stop, shown):
    ids = encode(loaded, "abc de f g h i")
    request, heard = feed(loaded, ids, stop=stop)
    assert heard.pop() == "stop_string" == request.result.finish_reason
    assert request.result.text == shown == "".join(info.text for info in heard)
    assert len(request.result.token_ids) < len(ids) and ids[:len(heard)] == request.result.token_ids


def test_what_may_be_a_stop_string_is_held_until_it_is_none(loaded):
    ids = encode(loaded, "abc de")
    request, heard = feed(loaded, ids, stop=("de never",))
    assert request.result.text == "abc " and not request.done
    request, heard = feed(loaded, ids, stop=("de never",), max_tokens=len(ids))
    assert request.result.text == "abc de" == "".join(info.text for info in heard[:-1])


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_log_probabilities_are_before_temperature_and_penalty(loaded, logprobs):
    heard = []
    row = torch.randn(300, generator=torch.Generator().manual_seed(0)).bfloat16()
    request = Request(0, loaded, [5], Sampling(max_tokens=3, temperature=0.3, top_k=2, seed=1,
                                               ignore_eos=True,
                                              repetition_penalty=2.0), logprobs, on_token=heard.append)
    request.append(request.sampler(row, request.kv.history), row)
    (info,) = heard
    want = row.float().log_softmax(-1)
    if logprobs is None:
        assert info.logprob is None and info.top == ()
        return
    assert info.logprob == float(want[info.id])
    best = want.topk(logprobs)
    assert info.top == tuple(zip(best.indices.tolist(), best.values.tolist()))


@pytest.mark.parametrize("chunks", [[200], [1, 199], [LOGPROB_ROWS, LOGPROB_ROWS, 72], [65, 64, 63, 8],
                                    [1] * 200])
def test_the_prompt_is_scored_chunk_by_chunk(loaded, chunks):
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 300, (200,), generator=random).tolist()
    logits = torch.randn(200, 300, generator=random)
    want = logits.log_softmax(-1)
    request = Request(0, loaded, prompt, Sampling(), 2, echo=True)
    end = 0
    for count in chunks:
        end += count
        request.score_prompt(logits[end - count:end], end)
    assert not request.has_unscored_prompt
    first, *scored = request.result.prompt_logprobs
    assert first == TokenInfo(prompt[0], "") and [info.id for info in scored] == prompt[1:]
    assert [info.logprob for info in scored] == pytest.approx(
        [float(want[i, prompt[i + 1]]) for i in range(199)], abs=1e-5)
    assert [info.top[0][0] for info in scored] == want[:-1].argmax(-1).tolist()


def test_the_prompt_counts_for_the_repetition_penalty(loaded):
    for penalty, chosen in ((1.0, 7), (1.5, 8)):
        row = torch.zeros(300)
        row[7], row[8] = 6.0, 5.0
        request = Request(0, loaded, [7], Sampling(repetition_penalty=penalty, ignore_eos=True))
        assert request.sampler.changes == (penalty != 1)
        assert sample_tokens(row[None], [request.sampler], [request.kv.history]) == [chosen]


def test_check_request(loaded):
    check_request(loaded, [0, 299], Sampling(max_tokens=510))
    for prompt in ([], [300], [-1], [5, 10**9]):
        with pytest.raises(UsageError) as caught:
            check_request(loaded, prompt, Sampling())
        assert caught.value.why
    with pytest.raises(ContextLengthError, match="3 tokens and 510") as caught:
        check_request(loaded, [5, 5, 5], Sampling(max_tokens=510))
    assert caught.value.context == (513, 512) and "509" in caught.value.next
    with pytest.raises(ContextLengthError) as caught:
        check_request(loaded, [5] * 600, Sampling(max_tokens=1))
    assert caught.value.context == (601, 512)


class Counting:
    """A constraint that is complete after some tokens and refuses one."""

    def __init__(self, length, refused=None):
        self.accepted, self._length, self._refused = [], length, refused

    @property
    def ended(self):
        return len(self.accepted) >= self._length

    def mask(self, scores):
        return scores

    def accept(self, token):
        if token == self._refused:
            raise ConstraintError("this token may not follow")
        self.accepted.append(token)


def test_a_complete_constraint_ends_the_answer(loaded):
    ids, ends = encode(loaded, "one two three"), []
    constraint = Counting(2)
    request = Request(0, loaded, [5], Sampling(max_tokens=9), constraint=constraint, on_done=ends.append)
    for token in ids[:2]:
        assert not request.done
        request.append(token, None)
    assert request.done and request.result.finish_reason == "stop" and ends == [request]
    assert constraint.accepted == request.result.token_ids == ids[:2]
    assert request.result.text == loaded.tokenizer.decode(ids[:2])


def test_a_token_that_a_constraint_refuses_is_not_appended(loaded):
    request = Request(0, loaded, [5], Sampling(max_tokens=9), constraint=Counting(9, refused=8))
    request.append(7, None)
    with pytest.raises(ConstraintError):
        request.append(8, None)
    assert request.result.token_ids == [7]


def test_special_tokens_that_are_kept_have_a_text(loaded):
    special = loaded.tokenizer.encode("<|im_start|>", special=False)
    assert len(special) == 1 and loaded.tokenizer.decode(special) == ""
    ids = [*encode(loaded, "a 😀")[:-1], *special, *encode(loaded, " b")]
    for kept, text in ((frozenset(special), "a \ufffd<|im_start|> b"), (frozenset(), "a \ufffd b")):
        request = Request(0, loaded, [5], Sampling(max_tokens=len(ids), ignore_eos=True), keep_special=kept)
        for token in ids:
            request.append(token, None)
        assert request.done and re.sub("\ufffd+", "\ufffd", request.result.text) == text


def test_an_unknown_token_in_a_bias(loaded):
    check_request(loaded, [5], Sampling(logit_bias=((299, 1),)))
    with pytest.raises(UsageError, match="300"):
        check_request(loaded, [5], Sampling(logit_bias=((300, 1), (2, 1))))
