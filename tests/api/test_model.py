"""A model in Python: it generates, streams, scores and converses as the engine does."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading

import pytest
import torch

import quantkit
from quantkit.api.model import Model
from quantkit.runtime.core import Request
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load as load_weights
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return quantkit.load(str(tiny_model(tmp_path_factory.mktemp("api") / "tiny")), progress=False)


def expected(model: Model, ids: list[int], **options) -> str:
    (done,) = generate(load_weights(model.loaded.uri), [ids], Sampling(**options))
    return done.text


def test_texts_messages_and_ids(model):
    text = expected(model, model.tokenizer.encode("the cat"), max_tokens=8)
    assert text and model.generate("the cat", max_tokens=8).text == text
    assert model.generate(model.tokenizer.encode("the cat"), max_tokens=8).text == text
    messages = [{"role": "user", "content": "the cat"}]
    assert model.generate(messages, max_tokens=8).text == expected(
        model, model.tokenizer.chat(messages), max_tokens=8)


def test_several_are_answered_in_their_order(model):
    prompts = [f"the cat {number}" for number in range(11)]  # more than run side by side
    together = model.generate_all(prompts, max_tokens=6, temperature=1.0, seed=3)
    assert [done.text for done in together] == [
        model.generate(prompt, max_tokens=6, temperature=1.0, seed=3).text for prompt in prompts]


def test_a_stream_gives_the_same_text_in_pieces(model):
    stream = model.stream("the cat", max_tokens=12)
    pieces = list(stream)
    assert len(pieces) > 3 and all(pieces)
    assert "".join(pieces) == stream.result.text == model.generate("the cat", max_tokens=12).text


@pytest.mark.parametrize("how", ["closed", "forgotten", "never begun"])
def test_a_stream_that_is_left_ends(model, how):
    stream = model.stream("the cat", max_tokens=60)
    if how != "never begun":
        next(stream)
    if how == "closed":
        stream.close()
        assert stream.result.finish_reason == "cancelled"
    else:
        del stream
        gc.collect()
    model.generate("a", max_tokens=1)
    stats = model.engine.stats()
    assert stats["running"] == stats["waiting"] == 0


def test_threads_share_a_model(model):
    texts = {}
    threads = [threading.Thread(target=lambda n=n: texts.update(
        {n: model.generate(f"the cat {n}", max_tokens=10).text})) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: model.generate(f"the cat {n}", max_tokens=10).text for n in range(5)}


def test_a_score_is_the_log_softmax(model):
    score = model.score("the cat sat on the mat")
    ids = torch.tensor([score.token_ids])
    logits = model.loaded.model(ids).double()
    exact = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert len(score.logprobs) == len(score.token_ids) - 1
    assert score.logprobs == pytest.approx(exact.tolist(), abs=1e-4)
    assert score.nll == pytest.approx(-float(exact.mean()), abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(score.nll))


def test_a_conversation_remembers(model):
    conversation = model.chat("be brief", max_tokens=6)
    first = conversation.send("the cat")
    second = "".join(conversation.stream("and the dog"))
    assert [message["content"] for message in conversation.messages] == [
        "be brief", "the cat", first, "and the dog", second]
    assert first == model.generate(conversation.messages[:2], max_tokens=6).text
    assert second == model.generate(conversation.messages[:4], max_tokens=6).text
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_what_came_of_an_answer_stays(model):
    conversation = model.chat(max_tokens=40)
    pieces = conversation.stream("the cat")
    begun = next(pieces)
    pieces.close()
    answer, all_of_it = conversation.messages[-1]["content"], model.generate(
        conversation.messages[:1], max_tokens=40).text
    assert all_of_it.startswith(answer) and answer.startswith(begun) and answer != all_of_it


def test_ctrl_c_never_cuts_a_step(model, monkeypatch):
    step, within = Engine.step, []

    def interrupted(engine):
        os.kill(os.getpid(), signal.SIGINT)
        within.append("begun")
        worked = step(engine)
        within.append("done")
        return worked

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(model.stream("the cat", max_tokens=60))
    monkeypatch.undo()
    assert within == ["begun", "done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert model.generate("the cat", max_tokens=4).text == expected(
        model, model.tokenizer.encode("the cat"), max_tokens=4)


@pytest.mark.parametrize(("options", "words"), [
    ({"temperature": -1}, "temperature"), ({"max_token": 3}, "max_token"), ({"top_p": 2}, "top_p")])
def test_wrong_options(model, options, words):
    with pytest.raises(UsageError, match=words):
        model.generate("a", **options)
    with pytest.raises(UsageError, match=words):
        model.chat(**options)


def test_a_text_of_one_token_has_no_score(model):
    with pytest.raises(UsageError, match="fewer than two tokens"):
        model.score("")


def test_kv_settings_and_drafts(model):
    other = quantkit.load(model.loaded.uri, kv="int8", draft="ngram", progress=False)
    assert str(other.kv) == "int8" and "int8" in repr(other)
    text = other.generate("the cat the cat the cat", max_tokens=12).text
    plain = quantkit.load(model.loaded.uri, kv=other.kv, progress=False)
    assert plain.generate("the cat the cat the cat", max_tokens=12).text == text
    with pytest.raises(UsageError):
        quantkit.load(model.loaded.uri, kv="int9", progress=False)


def test_how_blocks_are_written(tmp_path):
    folder, steps = str(tiny_model(tmp_path / "m", "sdar", dtype="float32")), []
    for blocks in (None, "1"):
        stream = quantkit.load(folder, blocks=blocks, progress=False).stream("the cat", max_tokens=12)
        assert "".join(stream) == stream.result.text
        steps.append(stream.result.denoising_steps)
    assert steps[1] < steps[0]
    with pytest.raises(UsageError, match="token after the other"):
        quantkit.load("synthetic:tiny", blocks="1", progress=False)


def test_an_error_is_that_of_its_request(model, monkeypatch):
    """Two streams, of which one fails: who steps the engine has nothing to do with it."""
    fails = model.stream("the cat", max_tokens=20)
    append, its = Request.append, fails._request

    def broken(request, *arguments, **options):
        if request is its and len(request.result.token_ids) == 3:
            raise ValueError("broken")
        return append(request, *arguments, **options)

    monkeypatch.setattr(Request, "append", broken)
    other = model.generate("the dog", max_tokens=8)
    assert other.finish_reason == "length" and len(other.token_ids) == 8
    with pytest.raises(ValueError, match="broken"):
        "".join(fails)


def test_a_list_with_a_bad_prompt_leaves_nothing_behind(model):
    with pytest.raises(UsageError):
        model.generate_all(["the cat", [1] * 100_000], max_tokens=4)
    stats = model.engine.stats()
    assert stats["running"] == stats["waiting"] == 0
