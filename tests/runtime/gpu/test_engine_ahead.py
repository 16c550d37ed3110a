"""The engine gives a GPU its next step before it has looked at the last one's tokens; nobody can tell."""

import itertools

import pytest

from quantkit.runtime import kv_manager
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import tables
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.runner import PipelinedDecoder
from quantkit.runtime.sampler import PendingTokens, Sampling
from quantkit.runtime.trace import RequestSpan, StepSpan
from quantkit.support.errors import QuantkitError


@pytest.fixture
def waiting(monkeypatch):
    """An engine that looks at every token at once, to compare with."""
    def switch():
        monkeypatch.setattr(PipelinedDecoder, "_can_run_ahead", lambda self, requests: False)

    return switch


def several(loaded, **more):
    """Requests that begin and end at different steps, greedy and drawn: their tokens."""
    engine, submitted = Engine(loaded, max_batch=3), []
    for at, count in enumerate((3, 1, 4, 2)):
        sampling = Sampling(max_tokens=count, ignore_eos=True, temperature=30.0 * (at % 2), seed=at, **more)
        submitted.append(engine.submit(list(range(5, 9 + at)), sampling))
        engine.step()
    while engine.step():
        pass
    assert engine.cache.used_bytes == 0 and not engine._decoder.pending
    return [request.result.token_ids for request in submitted]


def test_requests_that_come_and_go_give_the_same_tokens(loaded, waiting):
    found = several(loaded)
    assert [len(tokens) for tokens in found] == [3, 1, 4, 2]
    waiting()
    assert several(loaded) == found


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.4}, {"presence_penalty": 1.5,
                                                                   "logit_bias": ((7, 3.0),)}])
def test_penalties_count_tokens_that_the_host_has_not_read(loaded, waiting, monkeypatch, changes):
    launched, launch = [], PipelinedDecoder._launch
    monkeypatch.setattr(PipelinedDecoder, "_launch", lambda self, requests, ids: (
        launched.append(len(requests)), launch(self, requests, ids))[1])
    ahead = several(loaded, **changes)
    assert launched
    waiting()
    assert several(loaded, **changes) == ahead


def test_the_trace_has_a_token_where_it_is_read(loaded):
    engine = Engine(loaded)
    requests = []
    for counts in ((6,), (6, 4)):
        requests += [engine.submit(list(range(5, 9 + at)), Sampling(max_tokens=count, ignore_eos=True))
                     for at, count in enumerate(counts)]
        while engine.step():
            pass
    spans = [span for span in engine.trace.read() if isinstance(span, RequestSpan)]
    for request in requests:
        line = [span for span in spans if span.number == request.id]
        assert all(before.end <= after.start for before, after in itertools.pairwise(line))
        decoded = [span.tokens for span in line if span.kind == "decode"]
        assert decoded == [1] * len(request.result.token_ids) and line[-1].reason == "length"
    steps = [span for span in engine.trace.read() if isinstance(span, StepSpan)]
    # of one request: the prompt's step gives a token, the next one only launches
    assert [step.tokens for step in steps[:7]] == [1, 0, 1, 1, 1, 1, 1]
    assert sum(step.tokens for step in steps) == engine.stats()["tokens_generated"] == 16


def test_more_than_go_side_by_side_take_turns(loaded, monkeypatch):
    whole = several(loaded)
    monkeypatch.setattr(GpuModel, "decode_rows", 2)
    assert several(loaded) == whole


def test_a_step_is_launched_before_the_last_ones_tokens_are_read(loaded, monkeypatch):
    seen, model = [], loaded.model

    class Watched(GpuModel):
        def __call__(self, *given, **named):
            seen.append(len(request.result.token_ids))
            return super().__call__(*given, **named)

    model.__class__ = Watched
    engine = Engine(loaded)
    request = engine.submit([5, 6, 7], Sampling(max_tokens=5, ignore_eos=True))
    while engine.step():
        pass
    # behind the prompt a step; the next ones while one token is on its way; none after the last
    assert seen == [1, 1, 2, 3] and len(request.result.token_ids) == 5


def test_what_ends_in_the_middle_ends_there(loaded, waiting):
    free = Engine(loaded)
    request = free.submit([5, 6, 7], Sampling(max_tokens=6, ignore_eos=True, temperature=30.0, seed=4))
    while free.step():
        pass
    tokens = request.result.token_ids
    loaded.tokenizer.eos_ids = frozenset({tokens[2]})
    assert tokens[2] not in tokens[:2]
    engine = Engine(loaded)
    other = engine.submit(list(range(5, 14)), Sampling(max_tokens=5, ignore_eos=True))
    short = engine.submit([5, 6, 7], Sampling(max_tokens=6, temperature=30.0, seed=4))
    while engine.step():
        pass
    assert short.result.token_ids == tokens[:3] and short.result.finish_reason == "stop"
    assert len(other.result.token_ids) == 5 and engine.cache.used_bytes == 0
    waiting()
    alone = Engine(loaded)
    again = alone.submit(list(range(5, 14)), Sampling(max_tokens=5, ignore_eos=True))
    while alone.step():
        pass
    assert again.result.token_ids == other.result.token_ids


@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4, 5))])
def test_a_request_that_cancels_itself_gets_no_token_after_that(loaded, count):
    """Alone, and where another one joins in the step in which it did."""
    for steps in range(count + 2):
        engine, sampling = Engine(loaded), Sampling(max_tokens=9, ignore_eos=True)

        def stop(token, submitted=(submitted := [])):
            if len(submitted[0].result.token_ids) == count:
                submitted[0].cancel()

        submitted.append(request := engine.submit([5, 6, 7], sampling, on_token=stop))
        for _ in range(steps):
            engine.step()
        # this one's tokens are waited for
        engine.submit([5, 6, 8], Sampling(max_tokens=3, ignore_eos=True), logprobs=1)
        while engine.step():
            pass
        assert len(request.result.token_ids) == count and request.result.finish_reason == "cancelled"


def test_an_error_that_a_gpu_tells_late_ends_its_requests(loaded, monkeypatch):
    errors = []
    engine = Engine(loaded)
    request = engine.submit([5, 6, 7], Sampling(max_tokens=6, ignore_eos=True), on_error=errors.append)
    for _ in range(2):
        engine.step()

    def broken(drawn):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(PendingTokens, "tokens", broken)
    engine.step()
    assert request.done and [str(one) for one in errors] == ["an illegal memory access"]
    assert not engine._decoder.pending and not engine.step() and engine.cache.used_bytes == 0


@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 3.0}])
def test_who_asks_for_probabilities_gets_those_of_its_token(loaded, waiting, changes):
    """Also of those whose next step was launched before, each as many as it asks for."""
    def infos():
        engine, told = Engine(loaded), {count: [] for count in (None, 0, 2, 5)}
        for count, infos_of in told.items():
            engine.submit([5, 6, 7], Sampling(max_tokens=4, ignore_eos=True, **changes), logprobs=count,
                          on_token=infos_of.append)
        while engine.step():
            pass
        return told

    ahead = infos()
    waiting()
    at_once = infos()
    for count, told in ahead.items():
        assert [info.id for info in told] == [info.id for info in at_once[count]] and len(told) == 4
        assert all(len(info.top) == (count or 0) for info in told)
        for info, other in zip(told, at_once[count]):
            if count is None:
                assert info.logprob is None and not info.top
                continue
            assert info.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in info.top] == [token for token, _ in other.top]
            assert changes or count == 0 or info.top[0] == (info.id, info.logprob)


def test_a_step_that_fails_keeps_the_tokens_before(loaded, monkeypatch):
    calls, errors = [], []

    class Broken(GpuModel):
        def __call__(self, *given, **named):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return super().__call__(*given, **named)

    loaded.model.__class__ = Broken
    engine = Engine(loaded)
    request = engine.submit([5, 6, 7], Sampling(max_tokens=9, ignore_eos=True), on_error=errors.append)
    while engine.step():
        pass
    assert [str(one) for one in errors] == ["out of memory"] and len(request.result.token_ids) == 3
    assert engine.cache.used_bytes == 0


def test_output_that_is_not_finite_ends_its_own_request(loaded):
    errors, whole = [], GpuModel.__call__

    class Broken(GpuModel):
        def __call__(self, ids, *given, **named):
            found = whole(self, ids, *given, **named)
            if ids.shape == (2, 1):
                found[1, 0, 3] = float("nan")
            return found

    loaded.model.__class__ = Broken
    engine = Engine(loaded)
    good = engine.submit([5, 6, 7], Sampling(max_tokens=5, ignore_eos=True))
    bad = engine.submit([5, 6, 8], Sampling(max_tokens=5, ignore_eos=True), on_error=errors.append)
    while engine.step():
        pass
    assert len(good.result.token_ids) == 5 and bad.done and len(errors) == 1
    assert isinstance(errors[0], QuantkitError) and "finite" in errors[0].what


@pytest.mark.slow
def test_pages_that_run_out_and_prefixes_change_no_token(loaded, monkeypatch):
    """A request that gives up its pages was given a step ahead, and draws its tokens on the device."""
    for module in (kv_manager, tables):
        monkeypatch.setattr(module, "LOOKAHEAD", 4)

    def run(**more):
        engine = Engine(loaded, max_batch=3, context=512, **more)
        submitted = [engine.submit(list(range(length, 2 * length)), Sampling(
            max_tokens=12, ignore_eos=True, temperature=30.0, seed=length)) for length in (124, 122, 120)]
        while engine.step():
            pass
        engine.close()
        assert engine.cache.used_bytes == 0
        return [request.result.token_ids for request in submitted], engine.stats()["preemptions"]

    whole, none = run()
    found, preempted = run(memory=448 * Engine(loaded).cache.bytes_per_token, prefix_cache=None)
    assert found == whole and none == 0 < preempted
