"""What the trace says is what happened: every token, chunk, wait and end, each once and in order."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

import pytest

from quantkit.runtime import speculation
from quantkit.runtime.core import RequestLabel
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.trace import RequestSpan, StepSpan, Trace

pytestmark = pytest.mark.usefixtures("short_chunks")
SHORT = Sampling(max_tokens=30, ignore_eos=True)


def run(engine):
    while engine.step():
        pass


def spans_of(engine):
    """Spans by the request's number, with what holds for all of them checked; and the steps."""
    spans, steps = defaultdict(list), []
    for span in engine.trace.read():
        if isinstance(span, StepSpan):
            steps.append(span)
        else:
            spans[span.number].append(span)
    for line in (*spans.values(), steps):
        for span, following in itertools.pairwise(line):
            assert span.start <= span.end <= following.start <= following.end
    assert all(line[-1].kind == "end" and line[0].kind == "queue" for line in spans.values())
    assert sum(step.tokens for step in steps) == engine.stats()["tokens_generated"] == total(spans, "decode")
    assert len(steps) == engine.stats()["steps"]
    assert sum(step.prompt_tokens for step in steps) == engine.stats()["prompt_tokens"]
    return spans, steps


def total(spans, kind, field="tokens"):
    return sum(getattr(span, field) or 0 for line in spans.values() for span in line if span.kind == kind)


def kinds(line):
    """The kinds in their order, neighbors of a kind as one."""
    return [span.kind for at, span in enumerate(line) if not at or line[at - 1].kind != span.kind]


def test_a_request_from_its_arrival_to_its_end(loaded, prompt_of):
    engine = Engine(loaded)
    requests = [engine.submit(prompt_of(length, length), SHORT, label=RequestLabel("answer", choice))
                for choice, length in enumerate((5, 100, 40))]
    run(engine)
    spans, steps = spans_of(engine)
    for request in requests:
        line = spans[request.id]
        assert kinds(line) == ["queue", "prefill", "decode", "end"]
        assert line[0].start == request.schedule.arrived_at and line[-1].reason == "length"
        chunks = [span for span in line if span.kind == "prefill"]
        assert sum(span.tokens for span in chunks) == len(request.prompt)
        assert [span.cached for span in chunks] == [0, *[None] * (len(chunks) - 1)]
        assert len(request.prompt) <= 16 or len(chunks) > 1
        decoded = [span for span in line if span.kind == "decode"]
        assert [span.tokens for span in decoded] == [1] * 30
        assert all(span.drafted is None for span in decoded)
        assert {span.label for span in line} == {RequestLabel("answer", request.id)}
    assert max(step.decode_rows for step in steps) == 3


def test_only_what_came_from_the_prefix_cache_is_not_computed(small, prompt_of):
    engine, prompt = Engine(small, prefix_cache=1 << 24), prompt_of(150)
    for _ in range(2):
        engine.submit(prompt, SHORT)
        run(engine)
    spans, _ = spans_of(engine)
    cached = [next(span.cached for span in spans[number] if span.kind == "prefill") for number in (0, 1)]
    assert cached == [0, 128] and engine.stats()["prefix_hits"] == 128
    assert [total({0: line}, "prefill") for line in (spans[0], spans[1])] == [150, 150 - 128]
    assert engine.stats()["kv_pages_shared"] == 0 < engine.stats()["kv_pages_used"]
    engine.submit(prompt, SHORT)
    engine.step()
    heads = small.config.num_layers * small.config.num_kv_heads
    assert engine.stats()["kv_pages_shared"] == heads * 128 // 64, "with the prefix cache"
    engine.close()


def test_drafted_tokens(small, monkeypatch):
    monkeypatch.setattr(speculation, "best_length", lambda acceptance, times, others, limit: limit)
    engine = Engine(small, drafter=NgramDrafter(max_tokens=4, max_match=2, min_match=1))
    for seed in (7, 9):
        engine.submit([seed, 8, seed, 8, seed, 8], Sampling(max_tokens=60, ignore_eos=True))
    run(engine)
    spans, steps = spans_of(engine)
    counts, stats = engine.speculator.counts, engine.stats()
    assert counts.tokens > counts.accepted > 0
    for field, expected in (("drafted", counts.tokens), ("accepted", counts.accepted)):
        assert total(spans, "decode", field) == sum(getattr(step, field) for step in steps) == expected
        assert stats[field] == expected
    checked = [span for line in spans.values() for span in line if span.drafted]
    assert any(span.tokens > 1 for span in checked)
    assert all(span.accepted <= span.tokens <= span.accepted + 1 for span in checked)


def test_who_gives_up_pages_waits_again(small, prompt_of):
    engine = Engine(small, max_batch=3, memory=640 * Engine(small).cache.bytes_per_token)
    requests = [engine.submit(prompt_of(150, seed), Sampling(max_tokens=200, ignore_eos=True))
                for seed in range(3)]
    run(engine)
    spans, _ = spans_of(engine)
    gave_up = [span.number for line in spans.values() for span in line if span.kind == "preempted"]
    assert len(gave_up) == engine.stats()["preemptions"] > 0
    for request in requests:
        line = spans[request.id]
        assert gave_up.count(request.id) == request.kv.preemptions
        assert sum(span.kind == "queue" for span in line) == 1 + request.kv.preemptions
        for span, following in itertools.pairwise(line):
            assert (following.kind == "queue") == (span.kind == "preempted")
            assert span.kind != "preempted" or span.end == following.start
        assert total({0: line}, "decode") == request.sampling.max_tokens
        # what it had is computed again
        assert (total({0: line}, "prefill") > len(request.prompt)) == (request.kv.preemptions > 0)


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_who_is_cancelled_ends_there(loaded, prompt_of, long, steps):
    engine = Engine(loaded, max_batch=1)
    requests = [engine.submit(prompt_of(40, seed), long) for seed in range(2)]
    for _ in range(steps):
        engine.step()
    for request in requests:
        request.cancel()
    run(engine)
    spans, _ = spans_of(engine)
    assert kinds(spans[1]) == ["queue", "end"], "it never ran"
    assert kinds(spans[0]) == ["queue", *["prefill", "decode"][:(steps > 0) + (steps > 3)], "end"]
    assert [line[-1].reason for line in spans.values()] == ["cancelled"] * 2
    assert total({0: spans[0]}, "decode") == len(requests[0].result.token_ids)


def test_an_error_is_an_end(loaded, prompt_of, monkeypatch):
    engine, errors = Engine(loaded), []
    engine.submit(prompt_of(10), SHORT, on_error=errors.append)
    engine.step()
    monkeypatch.setattr(loaded.model, "forward", None)
    run(engine)
    spans, _ = spans_of(engine)
    assert len(errors) == 1 and spans[0][-1].reason == "error"
    assert kinds(spans[0]) == ["queue", "prefill", "decode", "end"]


def test_a_step_that_fails_for_all_is_done_again(loaded, prompt_of, monkeypatch):
    engine, forward, failures = Engine(loaded), loaded.model.forward, [RuntimeError("a passing fault")]
    requests = [engine.submit(prompt_of(40, seed), SHORT) for seed in range(2)]

    def fails_once(*arguments):
        if failures and len(arguments[0]) > 1:
            raise failures.pop()
        return forward(*arguments)

    monkeypatch.setattr(loaded.model, "forward", fails_once)
    run(engine)
    spans, _ = spans_of(engine)
    assert not failures and engine.stats()["preemptions"] > 0
    for request in requests:
        line = spans[request.id]
        assert sum(span.kind == "preempted" for span in line) == request.kv.preemptions
        assert total({0: line}, "decode") == 30 and total({0: line}, "prefill") >= 40
        failed = [span for span in line if span.kind == "prefill" and not span.tokens]
        assert len(failed) == request.kv.preemptions, "nothing came of the step that failed"


def test_a_text_for_a_vector_gets_no_token(loaded, prompt_of):
    engine = Engine(loaded)
    engine.submit(prompt_of(40), Sampling(max_tokens=1), pooling="mean")
    run(engine)
    spans, _ = spans_of(engine)
    assert kinds(spans[0]) == ["queue", "prefill", "end"] and spans[0][-1].reason == "stop"


def test_where_rows_go_apart(by_operation, prompt_of):
    engine = Engine(by_operation)
    for seed in range(3):
        engine.submit(prompt_of(30, seed), SHORT)
    run(engine)
    spans, _ = spans_of(engine)
    assert all(kinds(line) == ["queue", "prefill", "decode", "end"] for line in spans.values())


def test_the_last_ones_are_kept_and_each_is_read_once(loaded, prompt_of):
    engine = Engine(loaded)
    engine.trace = engine._scheduler._trace = Trace(size=50)
    engine.submit(prompt_of(20), Sampling(max_tokens=100, ignore_eos=True))
    run(engine)
    kept = engine.trace.read()
    assert len(kept) == 50 < engine.trace.recorded and kept[-1].kind == "end"
    clock = iter(range(1000))
    trace, request = Trace(clock=lambda: next(clock)), engine.submit(prompt_of(5), SHORT)
    times = [next(clock)]
    read = []
    for _ in range(5):
        trace.preempted(request)
        times.append(next(clock))
        read += trace.read(times[-2], times[-1])
    assert read == trace.read() and trace.recorded == len(read) == 10
    assert trace.read(times[-1]) == trace.read(until=times[0]) == []


def test_others_may_read_while_it_records(loaded, prompt_of):
    engine, read, ending = Engine(loaded), [], threading.Event()
    engine.trace = engine._scheduler._trace = Trace(size=10_000)

    def follow():
        since, last = float("-inf"), False
        while not last:
            last = ending.is_set()
            now = engine._clock()
            read.extend(engine.trace.read(since, now))
            since = now

    reader = threading.Thread(target=follow)
    reader.start()
    for seed in range(4):
        engine.submit(prompt_of(20, seed), Sampling(max_tokens=60, ignore_eos=True))
    run(engine)
    ending.set()
    reader.join(60)
    assert read == engine.trace.read() and sum(isinstance(span, RequestSpan) for span in read) > 240
