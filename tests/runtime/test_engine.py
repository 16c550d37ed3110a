"""The engine's steps: who joins, who leaves, what fails and what is heard."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from quantkit.kv.spec import parse_kv
from quantkit.runtime.core import EngineClosed, EngineFull, TokenInfo
from quantkit.runtime.cpu.program import CpuProgram
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import DEADLINE_FACTOR
from quantkit.support.errors import QuantkitError, UsageError

pytestmark = pytest.mark.usefixtures("short_chunks")


def test_cancel_while_waiting_prefilling_and_running(small, submit):
    engine = Engine(small, max_batch=2)
    running, first_end = submit(engine, 5)
    engine.step()
    prefilling, second_end = submit(engine, 60)
    waiting, third_end = submit(engine, 5)
    engine.step()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["tokens_generated"]) == (2, 1, 2)
    before = engine.cache.used_bytes
    waiting.cancel()
    assert not waiting.done
    engine.step()
    assert waiting.done and third_end == ["cancelled"] and waiting.result.token_ids == []
    prefilling.cancel()
    engine.step()
    assert prefilling.done and second_end == ["cancelled"] and engine.cache.used_bytes < before
    assert not running.done and engine.stats()["running"] == 1
    running.cancel()
    engine.step()
    assert running.done and first_end == ["cancelled"] and engine.cache.allocated_bytes == 0
    assert 3 <= len(running.result.token_ids) < 10 and running.result.text
    assert not engine.step()


def test_cancel_comes_too_late_for_what_is_done(small, submit):
    engine = Engine(small)
    request, ends = submit(engine, 5, Sampling(max_tokens=2, ignore_eos=True))
    engine.step()
    engine.step()
    request.cancel()
    engine.step()
    assert request.result.finish_reason == "length" and ends == ["length"]


def test_cancelling_everything_takes_the_next_at_once(small, submit):
    engine = Engine(small, max_batch=1)
    gone = [submit(engine, 30, seed=i)[0] for i in range(3)]
    last, _ = submit(engine, 8, Sampling(max_tokens=1, ignore_eos=True))
    for request in gone:
        request.cancel()
    engine.step()
    assert last.done and last.result.finish_reason == "length" and all(request.done for request in gone)


def test_the_queue_is_bounded_and_takes_again(small, submit):
    engine = Engine(small, max_batch=1, max_queue=2)
    submitted = [submit(engine, 3, Sampling(max_tokens=2, ignore_eos=True))[0] for _ in range(2)]
    with pytest.raises(EngineFull, match="2 requests wait") as caught:
        submit(engine, 3)
    assert isinstance(caught.value, QuantkitError) and caught.value.next
    engine.step()
    submitted.append(submit(engine, 3, Sampling(max_tokens=2, ignore_eos=True))[0])
    while engine.step():
        assert engine.stats()["waiting"] <= 2
    assert all(request.done for request in submitted)


def test_at_most_max_batch_run_and_in_the_order_they_came(small, submit):
    engine, done = Engine(small, max_batch=3), []
    for i in range(7):
        submit(engine, 20, Sampling(max_tokens=6, ignore_eos=True), seed=i,
               on_done=lambda request: done.append(request.id))
    while engine.step():
        assert engine.stats()["running"] <= 3
    assert done == list(range(7)) == sorted(done)


def test_a_short_prompt_goes_before_a_long_one_that_came_a_little_earlier(small, submit):
    engine, only = Engine(small, max_batch=16), Sampling(max_tokens=1, ignore_eos=True)
    long, _ = submit(engine, 100, only)
    engine.step()
    behind, _ = submit(engine, 100 - 16 // DEADLINE_FACTOR + 1, only)  # its deadline is behind the first's
    short, _ = submit(engine, 16, only)
    engine.step()
    assert short.done and long.kv.computed_tokens == 16 and not behind.kv.computed_tokens
    steps = 0
    while not long.done:  # all that come meanwhile are shorter
        submit(engine, 16, only)
        engine.step()
        steps += 1
    assert not behind.done and 32 + 16 * steps <= (DEADLINE_FACTOR + 1) * 100 + 16
    engine.close()


# -- errors


def test_the_error_of_one_request_is_its_own(small, prompt_of, submit):
    """A listener that fails, one that fails while it hears of it, and one that nobody listens to."""
    engine, errors = Engine(small), []

    def broken(info):
        raise RuntimeError("listener")

    sampling = Sampling(max_tokens=9, ignore_eos=True)
    good, ends = submit(engine, 9, sampling, seed=1)
    bad, bad_ends = submit(engine, 9, sampling, on_token=broken, on_error=errors.append)
    worse, _ = submit(engine, 9, sampling, on_token=broken, on_error=lambda error: broken(None))
    alone, _ = submit(engine, 9, sampling, on_token=broken)
    last, last_ends = submit(engine, 9, sampling, seed=2)
    raised = 0
    while True:
        try:
            if not engine.step():
                break
        except RuntimeError as error:
            assert str(error) == "listener"
            raised += 1
    assert raised == 2 and [str(error) for error in errors] == ["listener"]
    assert bad.done and worse.done and alone.done and bad_ends == []
    assert ends == last_ends == ["length"] and engine.cache.allocated_bytes == 0
    for request, seed in ((good, 1), (last, 2)):
        assert request.result == generate(small, [prompt_of(9, seed)], sampling)[0]


def test_listeners_of_the_end_that_fail_are_asked_once(small, submit):
    engine, calls = Engine(small, max_batch=1), []

    def end(request):
        calls.append(request.id)
        raise RuntimeError("end")

    submitted = [submit(engine, 5, seed=i, on_done=end)[0] for i in range(3)]
    engine.step()
    for request in submitted:
        request.cancel()
    with pytest.raises(RuntimeError, match="end"):
        engine.step()
    assert sorted(calls) == [0, 1, 2] and not engine.step() and engine.cache.allocated_bytes == 0


def test_a_step_of_the_model_that_fails_ends_those_in_it(small, monkeypatch, submit):
    engine, errors = Engine(small), []
    running = [submit(engine, 5, seed=i, on_error=errors.append)[0] for i in range(2)]
    for _ in range(2):
        engine.step()

    def fails(self, *args):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(CpuProgram, "step", fails)
        engine.step()
    assert all(request.done for request in running) and len(errors) == 2
    assert engine.cache.allocated_bytes == 0
    assert submit(engine, 5, Sampling(max_tokens=3, ignore_eos=True)) and engine.step()


@pytest.mark.parametrize(("prompt", "sampling", "said"), [
    ([], Sampling(), "is empty"), ([3, 300], Sampling(), "doesn't know"), ([-1], Sampling(), "doesn't know")])
def test_a_bad_prompt_is_refused_before_it_is_queued(small, prompt, sampling, said, submit):
    engine = Engine(small)
    with pytest.raises(UsageError, match=said):
        engine.submit(prompt, sampling)
    assert not engine.step()


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_queue": 0}, {"max_batch": -1}])
def test_bad_sizes(small, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Engine(small, **wrong)


# -- what is heard


def test_logprobs_are_those_of_the_model(loaded, prompt_of, submit):
    """float32, against the whole sequence run at once."""
    prompt, heard, engine = prompt_of(40), [], Engine(loaded)
    request = engine.submit(prompt, Sampling(max_tokens=10, temperature=1.5, seed=4, top_k=50,
                                             ignore_eos=True,
                                            repetition_penalty=1.2),
                           logprobs=5, echo=True, on_token=heard.append)
    while engine.step():
        pass
    ids = prompt + request.result.token_ids
    want = loaded.model(torch.tensor([ids]))[0].log_softmax(-1)
    assert [info.id for info in heard] == request.result.token_ids
    scored = request.result.prompt_logprobs
    assert [info.id for info in scored] == prompt
    assert scored[0] == TokenInfo(prompt[0], "")
    for place, info in enumerate([*scored[1:], *heard]):
        row = want[place]
        assert info.logprob == pytest.approx(float(row[ids[place + 1]]), abs=1e-4)
        assert [chance for _, chance in info.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
        assert all(chance == pytest.approx(float(row[token]), abs=1e-4) for token, chance in info.top)
        assert len({token for token, _ in info.top}) == 5


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 100])
def test_echo_scores_every_prompt_token_whatever_the_chunks(loaded, length, monkeypatch, prompt_of, submit):
    engine, prompt = Engine(loaded), prompt_of(length)
    plain, _ = submit(engine, length, Sampling(max_tokens=2, ignore_eos=True))
    request, _ = submit(engine, length, Sampling(max_tokens=2, ignore_eos=True), echo=True)
    while engine.step():
        pass
    want = loaded.model(torch.tensor([prompt]))[0].log_softmax(-1)
    scored = request.result.prompt_logprobs
    assert [info.id for info in scored] == prompt and scored[0].logprob is None
    assert [info.logprob for info in scored[1:]] == pytest.approx(
        [float(want[i, prompt[i + 1]]) for i in range(length - 1)], abs=1e-4)
    assert all(info.top == () and info.text == "" for info in scored)
    assert plain.result.prompt_logprobs is None and plain.result.token_ids == request.result.token_ids


@pytest.mark.parametrize(("asked", "count"), [(None, 0), (0, 0), (1, 1), (1000, 300)])
def test_as_many_of_the_most_likely_as_asked(small, asked, count, submit):
    engine, heard = Engine(small), []
    submit(engine, 5, Sampling(max_tokens=2, ignore_eos=True), logprobs=asked, on_token=heard.append)
    while engine.step():
        pass
    for info in heard:
        assert (info.logprob is None) == (asked is None) and len(info.top) == count
        assert list(info.top) == sorted(info.top, key=lambda one: -one[1])
        if count == 300:
            assert dict(info.top)[info.id] == info.logprob


def test_the_pieces_are_the_text_up_to_a_stop_string(small, prompt_of, submit):
    whole, _ = submit(Engine(small), 6)
    (whole,) = generate(small, [prompt_of(6)], Sampling(max_tokens=30, ignore_eos=True))
    stop, engine, heard = whole.text[9:12], Engine(small), []
    request = engine.submit(prompt_of(6), Sampling(max_tokens=30, ignore_eos=True, stop=("nowhere", stop)),
                           on_token=heard.append)
    while engine.step():
        pass
    assert request.result.finish_reason == "stop_string"
    assert request.result.text == whole.text[:whole.text.index(stop)] == "".join(info.text for info in heard)
    assert [info.id for info in heard] == request.result.token_ids
    assert whole.token_ids[:len(heard)] == request.result.token_ids and len(heard) < 30


def test_stats_count(small, submit):
    engine = Engine(small, max_batch=4, max_queue=9)
    empty = engine.stats()
    assert empty == dict.fromkeys(empty, 0) | {"max_batch": 4, "max_queue": 9, "block_size": 1}
    for n in (1, 2, 5):
        submit(engine, 20, Sampling(max_tokens=n, ignore_eos=True))
    assert engine.stats()["waiting"] == 3
    engine.step()
    now = engine.stats()
    assert (now["running"], now["waiting"]) == (3, 0)
    assert now["kv_allocated_bytes"] == engine.cache.allocated_bytes >= now["kv_used_bytes"] > 0
    while engine.step():
        pass
    now = engine.stats()
    assert now == empty | {"tokens_generated": 8, "prompt_tokens": 60,
                           "steps": now["steps"]}
    assert 6 <= now["steps"] <= 9
    assert (engine.timing.prefill_tokens, engine.timing.decode_tokens) == (60, 0 + 1 + 4)


def test_the_setting_is_the_callers_or_the_models(small):
    model = dataclasses.replace(small, manifest=SimpleNamespace(recipe={"kv": "window(9)+int8"}))
    assert Engine(model).cache.spec == model.kv
    assert str(Engine(model, kv=parse_kv("none")).cache.spec) == "none"
    with pytest.raises(UsageError, match="window"):
        Engine(small, kv=parse_kv("window(0)"))


# -- closing


def test_close_cancels_running_prefilling_and_waiting(small, submit):
    engine = Engine(small, max_batch=3)
    all_ends = [submit(engine, 5, seed=i) for i in range(2)]
    for _ in range(3):
        engine.step()
    all_ends += [submit(engine, 200, seed=i) for i in range(3)]
    engine.step()
    engine.close()
    assert [ends for _, ends in all_ends] == [["cancelled"]] * 5
    assert all(request.done for request, _ in all_ends)
    assert engine.cache.allocated_bytes == 0
    with pytest.raises(EngineClosed):
        submit(engine, 3)
    engine.close()


def test_close_gives_back_pages_that_lie_below_others(small, submit):
    """A running sequence's newest page lies above those of a prompt that is given back first, and moves:
    outside of the stepping thread and of inference mode."""
    engine = Engine(small)
    submit(engine, 50)
    engine.step()
    submit(engine, 400, Sampling(max_tokens=1))
    for _ in range(20):
        engine.step()
    engine.close()
    assert engine.cache.allocated_bytes == 0


# -- a cache of a fixed size

LONG = Sampling(max_tokens=30, ignore_eos=True)


def test_what_never_fits_is_refused_when_it_is_submitted(small, submit):
    engine = Engine(small, max_batch=1, memory=256 * Engine(small).cache.bytes_per_token)
    with pytest.raises(UsageError, match="260 tokens don't fit") as caught:
        submit(engine, 230, LONG)
    assert "256 tokens" in caught.value.why and not engine.step()
    request, ends = submit(engine, 200, LONG)
    while engine.step():
        pass
    assert ends == ["length"] and request.done


def test_those_that_end_early_give_their_room_back(small, submit):
    engine = Engine(small, max_batch=4, memory=256 * Engine(small).cache.bytes_per_token)
    first, ends = submit(engine, 150, LONG)
    second, _ = submit(engine, 150, LONG)
    engine.step()
    assert engine.stats()["running"] == 1 and engine.stats()["waiting"] == 1
    first.cancel()
    engine.step()
    assert ends == ["cancelled"] and engine.stats()["waiting"] == 0 and not second.done
    engine.close()
