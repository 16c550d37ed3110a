"""Prefixes that are reused, requests that give up their pages, settings of their own: no bit changes."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quantkit.kv.prefix import BlockPrefixes
from quantkit.kv.spec import parse_kv
from quantkit.runtime import engine as module
from quantkit.runtime import kv_manager
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import DEADLINE_FACTOR, ChunkSizer
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model

CHUNK = 128
KV = ("none", "int8", "int4", "int2", "window(70, sinks=2)", "window(70)+int4", "snapkv(0.4, window=8)+int4",
      "h2o(40, interval=7)", "tova(50, interval=3)+int4", "kvzip(0.5, chunk=128)", "adakv(0.4)")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One that runs as a program, and one that goes operation by operation."""
    folder = tmp_path_factory.mktemp("reuse")
    return {name: load(str(tiny_model(folder / name, name, max_position_embeddings=2048, **more)))
            for name, more in (("qwen3", {}), ("mixtral", {"head_dim": 32}))}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", CHUNK)


@dataclasses.dataclass(frozen=True)
class Request:
    """When it comes, how much of which common text it begins with, what follows, and how it goes on."""

    arrives: int
    base: int
    shared: int
    more: int
    seed: int
    sampling: Sampling
    kv: str | None = None
    priority: int = 0
    leaves: int | None = None

    @property
    def prompt(self):
        common, own = random.Random(self.base), random.Random(self.seed)
        return [*(common.randrange(4, 300) for _ in range(self.shared)),
                *(own.randrange(4, 300) for _ in range(self.more))]


SAMPLINGS = st.builds(Sampling, max_tokens=st.integers(1, 90), temperature=st.sampled_from([0.0, 1.3]),
                      seed=st.integers(0, 2**16), ignore_eos=st.just(True))
REQUESTS = st.builds(
    Request, st.integers(0, 12), st.integers(0, 1), st.sampled_from([0, 64, 130, 200, 256, 300]),
    st.integers(1, 150), st.integers(0, 5), SAMPLINGS,
    priority=st.sampled_from([0, 0, 0, -1, 2]), leaves=st.sampled_from([None, None, None, 3]))


def run(engine, requests, forced=None):
    """Tokens with their exact log-probabilities, a list for each request, and the requests.

    Args:
        forced: seed of steps in which a request is preempted though pages are left; at most six.
    """
    heard, submitted, now = [[] for _ in requests], [None] * len(requests), 0
    draw = random.Random(forced)

    def listen(index, info):
        heard[index].append((info.id, info.logprob, info.top))
        if len(heard[index]) == requests[index].leaves:
            submitted[index].cancel()

    while True:
        for index, one in enumerate(requests):
            if one.arrives == now:
                submitted[index] = engine.submit(
                    one.prompt, one.sampling, logprobs=2, priority=one.priority,
                    kv=None if one.kv is None else parse_kv(one.kv),
                    on_token=lambda info, index=index: listen(index, info))
        now += 1
        scheduler = engine._scheduler
        if forced is not None and scheduler.preemptions < 6 and scheduler.running and draw.random() < 0.2:
            scheduler.preempt(draw.choice([*scheduler.prefilling, *scheduler.decoding]))
        if not engine.step() and all(submitted):
            break
    assert all(request.done for request in submitted)
    return heard, submitted


ALONE = {}


def alone(loaded, kv, request):
    """What a request gets by itself, where nothing is reused and nothing is missing."""
    request = dataclasses.replace(request, arrives=0, leaves=None, priority=0)
    key = id(loaded), kv, repr(request)
    if key not in ALONE:
        ALONE[key] = run(Engine(loaded, kv=parse_kv(kv)), [dataclasses.replace(request, kv=None)])[0][0]
    return ALONE[key]


def check(loaded, kv, engine, requests, forced=None):
    heard, submitted = run(engine, requests, forced)
    for request, got, handle in zip(requests, heard, submitted):
        whole = alone(loaded, request.kv or kv, request)
        assert got == whole[:len(got)], "tokens or log-probabilities differ"
        assert len(got) == len(whole) or len(got) - (request.leaves or -9) in (0, 1)
        assert handle.result.cached_tokens < len(request.prompt)
    engine.close()
    for manager in engine._settings.managers:
        assert manager.cache.used_bytes == 0 and manager.cache.numbers == ()
        assert manager.reservation is None or not manager.reservation._reserved


def settings_of(examples):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck),
                    phases=[Phase.explicit, Phase.generate])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "kv"), [*(("qwen3", kv) for kv in KV), ("mixtral", "none"),
                                          ("mixtral", "int4"), ("mixtral", "h2o(40, interval=7)")])
def test_order_company_chunks_prefixes_and_preemption_change_no_bit(models, name, kv, monkeypatch):
    cut = random.Random(1)
    monkeypatch.setattr(ChunkSizer, "tokens_in", lambda self, seconds: cut.choice((1, 16, 40, 64, 128)))
    loaded = models[name]

    @settings_of(6 if name == "qwen3" else 3)
    @given(st.lists(REQUESTS, min_size=2, max_size=8), st.integers(1, 8), st.integers(0, 2**16),
           st.sampled_from([None, 1 << 20]))
    def holds(requests, max_batch, forced, prefix):
        engine = Engine(loaded, kv=parse_kv(kv), max_batch=max_batch, max_queue=99, max_itl=1.0,
                        prefix_cache=prefix)
        check(loaded, kv, engine, requests, forced)

    holds()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kv", KV)
def test_where_pages_run_out_the_last_ones_wait_and_get_the_same_bits(models, kv, monkeypatch):
    monkeypatch.setattr(kv_manager, "LOOKAHEAD", 4)  # answers are short
    loaded, preempted = models["qwen3"], []
    least = 1 << 17
    while True:  # the least memory in which the longest fits
        try:
            engine = Engine(loaded, kv=parse_kv(kv), max_batch=6, memory=least, context=600)
            engine.reservation.check(540)
            break
        except UsageError:
            least += least // 4

    @settings_of(8)
    @given(st.lists(REQUESTS, min_size=3, max_size=8), st.sampled_from([0, None]),
           st.sampled_from([1.0, 1.6]))
    def holds(requests, prefix, factor):
        try:
            engine = Engine(loaded, kv=parse_kv(kv), max_batch=6, max_queue=99, context=600,
                            memory=int(least * factor), prefix_cache=prefix)
            engine.reservation.check(540)
        except UsageError:  # states that are kept need some of it
            return
        before, moves = engine.cache.allocated_bytes, engine.cache.move_counter.count
        check(loaded, kv, engine, requests)
        assert engine.cache.move_counter.count == moves and engine.cache.allocated_bytes <= before * 1.01
        preempted.append(engine.stats()["preemptions"])

    holds()
    assert preempted and (any(preempted) or kv not in ("none", "int8"))


def test_requests_with_settings_of_their_own_run_side_by_side(models):
    loaded = models["qwen3"]

    @settings_of(12)
    @given(st.lists(st.builds(lambda request, kv: dataclasses.replace(request, kv=kv), REQUESTS,
                              st.sampled_from([None, *KV])), min_size=2, max_size=8))
    def holds(requests):
        check(loaded, "int8", Engine(loaded, kv=parse_kv("int8"), max_queue=99, prefix_cache=None), requests)

    holds()


def test_a_setting_for_which_no_memory_is_set_aside_is_refused(models):
    loaded, sampling = models["qwen3"], Sampling(max_tokens=4, ignore_eos=True)
    engine = Engine(loaded, kv=parse_kv("int8"), more_kv=[parse_kv("int4")], memory=8 << 20, context=600)
    sizes = [manager.cache.allocated_bytes for manager in engine._settings.managers]
    assert len(sizes) == 2 and max(sizes) <= 4 << 20
    with pytest.raises(UsageError, match="no memory is set aside for the KV setting none") as caught:
        engine.submit([5, 6], sampling, kv=parse_kv("none"))
    assert "int8" in caught.value.why and "int4" in caught.value.why
    request = engine.submit([5, 6], sampling, kv=parse_kv("int4"))
    while engine.step():
        pass
    assert len(request.result.token_ids) == 4


def test_choices_of_one_prompt_read_it_once(models):
    loaded = models["qwen3"]
    one = Request(0, 0, 300, 30, 1, Sampling(max_tokens=5, ignore_eos=True))
    samplings = [dataclasses.replace(one.sampling, temperature=1.0, seed=seed) for seed in range(5)]
    requests = [dataclasses.replace(one, sampling=sampling) for sampling in samplings]
    engine = Engine(loaded, prefix_cache=None)
    heard, submitted = run(engine, requests)
    assert [request.result.cached_tokens for request in submitted] == [0, 320, 320, 320, 320]
    assert engine.stats()["prompt_tokens"] == 330 + 4 * 10
    assert engine.stats()["prefix_hits"] == 4 * 320 and engine.stats()["prefix_queries"] == 5 * 330
    assert heard == [alone(loaded, "none", request) for request in requests]


def test_an_answer_that_grows_gives_up_prefixes_that_nobody_reads(models):
    """And if even all of them aren't enough, none, and its reservation stays as it was."""
    loaded = models["qwen3"]
    token_bytes = Engine(loaded).cache.bytes_per_token
    engine = Engine(loaded, max_batch=2, context=1000, memory=640 * token_bytes, prefix_cache=None)
    sampling = Sampling(max_tokens=300, ignore_eos=True)
    for seed in range(2):
        engine.submit(Request(0, 0, 0, 128, seed, sampling).prompt, Sampling(max_tokens=1))
    while engine.step():
        pass
    assert engine.stats()["prefix_cache_bytes"] == 256 * token_bytes
    growing = [engine.submit(Request(0, 0, 0, 190, seed, sampling).prompt, sampling) for seed in (7, 8)]
    engine.step()
    assert engine.stats()["running"] == 2 and engine.stats()["prefix_cache_bytes"] == 0
    reservation = engine.reservation
    before = dict(reservation._reserved)
    assert not reservation.extend(growing[0].kv.sequence, 500, engine._settings.default.prefixes)
    assert reservation._reserved == before
    while engine.step():
        pass
    assert [request.result.finish_reason for request in growing] == ["length"] * 2
    assert engine.stats()["preemptions"] == 1


def test_the_next_turn_reads_what_is_new(models):
    loaded, engine = models["qwen3"], Engine(models["qwen3"], prefix_cache=None)
    one = Request(0, 0, 200, 30, 1, Sampling(max_tokens=80, ignore_eos=True))
    _, (first,) = run(engine, [one])
    prompt = one.prompt + first.result.token_ids + [9, 8, 7]
    second = engine.submit(prompt, one.sampling)
    while engine.step():
        pass
    assert second.result.cached_tokens == 256 and len(prompt) == 313  # of 309 that were in the cache
    fresh = Engine(loaded)
    again = fresh.submit(prompt, one.sampling)
    while fresh.step():
        pass
    assert again.result.token_ids == second.result.token_ids and again.result.cached_tokens == 0


@pytest.mark.parametrize("kv", ["window(70)", "window(70)+int4", "window(300)", "window(300)+int8"])
def test_a_window_s_slots_lie_where_they_would_lie(models, kv, monkeypatch):
    """After a prompt's end they lie elsewhere, and their sums are rounded otherwise."""
    monkeypatch.setattr(module, "PREFILL_CHUNK", 512)
    loaded, engine = models["qwen3"], Engine(models["qwen3"], kv=parse_kv(kv), prefix_cache=None)
    first = Request(0, 0, 640, 0, 1, Sampling(max_tokens=40, ignore_eos=True))
    for later in (first, Request(0, 0, 640, 90, 2, first.sampling), Request(0, 0, 660, 5, 3, first.sampling)):
        (heard,), (handle,) = run(engine, [later])
        assert heard == run(Engine(loaded, kv=parse_kv(kv)), [later])[0][0]
    assert handle.result.cached_tokens in (512, 576)
    engine.close()


@pytest.mark.parametrize("kv", ["snapkv(0.4, window=8)", "h2o(60)"])
def test_what_a_policy_left_is_nobody_s_prefix(models, kv):
    """Only what was there before it acted."""
    loaded, engine = models["qwen3"], Engine(models["qwen3"], kv=parse_kv(kv), prefix_cache=None)
    one = Request(0, 0, 200, 30, 1, Sampling(max_tokens=80, ignore_eos=True))
    _, (first,) = run(engine, [one])
    longer = dataclasses.replace(one, shared=0, more=0)
    prompt = one.prompt + first.result.token_ids
    second = engine.submit(prompt, longer.sampling)
    while engine.step():
        pass
    assert second.result.cached_tokens == 192 < len(one.prompt)
    fresh = Engine(loaded, kv=parse_kv(kv))
    again = fresh.submit(prompt, longer.sampling)
    while fresh.step():
        pass
    assert again.result.token_ids == second.result.token_ids


def test_a_higher_priority_goes_first_and_takes_pages(models):
    loaded = models["qwen3"]
    engine = Engine(loaded, max_batch=4, context=600, max_queue=9,
                    memory=450 * Engine(loaded).cache.bytes_per_token)
    low = Request(0, 0, 0, 250, 1, Sampling(max_tokens=60, ignore_eos=True), priority=5)
    high = Request(3, 0, 0, 250, 2, Sampling(max_tokens=20, ignore_eos=True), priority=-1)
    last = Request(2, 0, 0, 250, 3, Sampling(max_tokens=4, ignore_eos=True), priority=5)
    heard, submitted = run(engine, [low, high, last])
    assert [request.kv.preemptions for request in submitted] == [1, 0, 0]
    assert submitted[1].schedule.admitted_at < submitted[2].schedule.admitted_at
    assert heard == [alone(loaded, "none", request) for request in (low, high, last)]


def test_embeddings_do_not_depend_on_company_or_cut(models, monkeypatch):
    loaded, prompt = models["qwen3"], Request(0, 0, 200, 77, 1, Sampling(max_tokens=1)).prompt
    vectors = []
    for seed in (None, 1, 2):
        engine = Engine(loaded, max_itl=1.0, prefix_cache=None)
        if seed is not None:
            cut = random.Random(seed)
            monkeypatch.setattr(ChunkSizer, "tokens_in",
                                lambda self, seconds, cut=cut: cut.choice((1, 16, 40)))
            engine.submit(prompt[:30], Sampling(max_tokens=99, ignore_eos=True))
            engine.step()
        requests = [engine.submit(prompt, Sampling(max_tokens=1), pooling=pooling)
                    for pooling in ("mean", "last")]
        while engine.step():
            pass
        assert all(request.result.finish_reason == "stop" and not request.result.token_ids
                   for request in requests)
        vectors.append([request.result.embedding.tolist() for request in requests])
    assert vectors[0] == vectors[1] == vectors[2] and vectors[0][0] != vectors[0][1]
    assert len(vectors[0][0]) == loaded.config.hidden_size


def test_what_a_request_may_choose_is_bounded(models):
    engine, sampling = Engine(models["qwen3"], prefix_cache=None), Sampling(max_tokens=3, ignore_eos=True)
    with pytest.raises(UsageError, match="keeps 2,147,483,647 queries"):
        engine.prepare(parse_kv("snapkv(0.5, window=2147483647)"))
    with pytest.raises(UsageError, match="keeps 300 queries"):
        engine.submit([5, 6], sampling, kv=parse_kv("snapkv(0.5, window=300)"))
    for bits in ("2", "2.5", "3", "3.5", "4"):  # each has kernels of its own
        for more in ("", ", residual_length=64", ", residual_length=128", ", sinks=64"):
            setting = parse_kv(f"rotation({bits}{more})")
            engine.prepare(setting)
            engine.submit([5, 6, 7], sampling, kv=setting)
            while engine.step():
                pass
    assert len(engine._settings.managers) <= 9 and len(models["qwen3"].model._programs) <= 12


def test_an_embedding_that_is_not_finite_is_an_error(models, monkeypatch):
    engine, errors = Engine(models["qwen3"]), []
    hidden = type(models["qwen3"].model).hidden
    monkeypatch.setattr(type(models["qwen3"].model), "hidden",
                        lambda self, ids, cache: hidden(self, ids, cache=cache) * float("nan"))
    engine.submit([5, 6, 7], Sampling(max_tokens=1), pooling="mean", on_error=errors.append)
    while engine.step():
        pass
    assert len(errors) == 1 and "not finite" in errors[0].what and engine.cache.used_bytes == 0


def test_an_error_while_a_prefix_is_kept_is_its_request_s(models, monkeypatch):
    engine, errors = Engine(models["qwen3"], prefix_cache=None), []
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    good = engine.submit(list(range(5, 25)), sampling)
    engine.step()

    def broken(cache, names, number):
        raise MemoryError("no pages")

    bad = engine.submit(list(range(5, 205)), sampling, on_error=errors.append)
    with monkeypatch.context() as patch:
        patch.setattr(BlockPrefixes, "insert", broken)
        while not bad.done:
            engine.step()
    while engine.step():
        pass
    assert [str(error) for error in errors] == ["no pages"] and len(good.result.token_ids) == 30
    engine.close()
    assert engine.cache.used_bytes == 0


# -- a prompt that begins like one which is being read waits for that part and takes it up


def text(shared, more, seed):
    """Tokens that all such texts begin with, and others behind them."""
    common, rest = random.Random(0), random.Random(seed)
    return [*(common.randrange(4, 300) for _ in range(shared)),
            *(rest.randrange(4, 300) for _ in range(more))]


def test_who_waited_for_a_state_takes_it_before_it_is_gone(models):
    """Many states of a long prompt come after the one that another prompt waited for."""
    cache = Engine(models["qwen3"], kv=parse_kv("int4")).cache
    state_bytes = 128 * (cache.bytes_per_token + cache.residual_bytes_per_token)
    engine = Engine(models["qwen3"], kv=parse_kv("int4"), max_itl=1.0, prefix_cache=4 * state_bytes)
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    long = text(128, 1200, 1)
    short = text(128, 20, 2)
    requests = [engine.submit(prompt, sampling, priority=place) for place, prompt in enumerate((long, short))]
    while engine.step():
        pass
    assert [request.result.cached_tokens for request in requests] == [0, 128]
    late = engine.submit(short, sampling)
    while engine.step():
        pass
    assert late.result.cached_tokens == 0, "by now it is"


@pytest.mark.parametrize("kv", ["none", "int4"])
def test_who_waits_for_a_long_prompt_s_beginning_goes_on_when_that_is_read(models, kv):
    engine, sampling = Engine(models["qwen3"], kv=parse_kv(kv), prefix_cache=None), Sampling(max_tokens=1)
    long = engine.submit(text(256, 900, 1), sampling)
    engine.step()
    short = engine.submit(text(256, 20, 2), sampling)
    engine.step()
    assert long.kv.computed_tokens == 2 * CHUNK and short.kv.computed_tokens <= CHUNK
    engine.step()
    assert short.done and short.result.cached_tokens == 256 and not long.done
    later = engine.submit(text(256, 20, 3), sampling)
    engine.step()
    assert later.done and later.result.cached_tokens == 256 and not long.done
    engine.close()


def test_who_waits_gives_its_place_to_what_it_waits_for(models):
    """Though others of its priority keep coming, and what it waits for has a lower one."""
    engine, sampling = Engine(models["qwen3"], prefix_cache=None, max_batch=32), Sampling(max_tokens=1)
    long = engine.submit(text(512, 900, 1), sampling, priority=1)
    engine.step()
    waits = engine.submit(text(512, 20, 2), sampling)
    for step in range(10 * DEADLINE_FACTOR):  # some of the others come first
        for seed in range(2):
            engine.submit(text(0, CHUNK, 10 + 2 * step + seed), sampling)
        engine.step()
    assert waits.done and waits.result.cached_tokens == 512 and long.kv.computed_tokens == 512
    while engine.step():
        pass
    assert long.done
    engine.close()


def test_a_prompt_begins_with_what_was_read_of_another_before_it_came(models):
    engine, sampling = Engine(models["qwen3"], prefix_cache=None), Sampling(max_tokens=1)
    long = engine.submit(text(256, 900, 1), sampling)
    for _ in range(3):
        engine.step()
    short = engine.submit(text(256, 20, 2), sampling)
    engine.step()
    assert short.done and short.result.cached_tokens == 256 and not long.done
    engine.close()
