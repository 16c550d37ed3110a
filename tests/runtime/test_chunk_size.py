"""Chunks of a prompt beside others that decode, on machines whose time is made up."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from statistics import median

import pytest

from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime import engine as module
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.engine import PREFILL_CHUNK, Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import CHUNKS, LEAST, REFRESH, SLOWDOWN, ChunkSizer
from quantkit.testing import tiny_model

ITL = 0.05


@dataclasses.dataclass
class Machine:
    """Seconds of a decode step, of a chunk, of each of its tokens, and of each token for each before it."""

    decode: float
    fixed: float
    token: float
    context: float
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self._random = random.Random(self.seed)

    def step(self, tokens=0, context=0):
        """Seconds of a step with so many tokens of a prompt."""
        chunk = self.fixed + tokens * (self.token + self.context * (context + tokens / 2)) if tokens else 0
        return (self.decode + chunk) * self._random.lognormvariate(0, self.noise)

    def read(self, sizer, length, start=0):
        """A prompt beside others, after tokens of theirs alone: sizes of its chunks, and steps' seconds."""
        for _ in range(20):
            sizer.observe(self.step(), 0)
        sizes, gaps, at = [], [], start
        while at < start + length:
            sizes.append(min(sizer.tokens_in(sizer.spare), start + length - at))
            gaps.append(self.step(sizes[-1], at))
            at += sizes[-1]
            if at < start + length:  # as in the engine: a prompt's end says nothing
                sizer.observe(gaps[-1], sizes[-1])
        return sizes, gaps


MACHINES = {"a small model on two cores": Machine(0.009, 0.003, 0.0006, 4e-7),
            "the same, five times slower": Machine(0.045, 0.015, 0.003, 2e-6),
            "a large model on a few cores": Machine(0.5, 0.45, 0.04, 1e-6),
            "a GPU": Machine(0.006, 0.004, 0.00002, 1e-9),
            "one where a chunk costs much by itself": Machine(0.02, 0.015, 0.0001, 1e-8)}


def limit(machine, length):
    """What a gap may be, or what the smallest chunk takes at the end of such a prompt."""
    least = dataclasses.replace(machine, noise=0.0).step(LEAST, length)
    return max(ITL, SLOWDOWN * machine.decode, least)


@pytest.mark.parametrize("name", MACHINES)
def test_gaps_are_short_and_hardly_shorter_than_they_may_be(name):
    machine = MACHINES[name]
    sizes, gaps = machine.read(ChunkSizer(PREFILL_CHUNK, ITL), 6000)
    assert sum(sizes) == 6000 and max(gaps) <= limit(machine, 6000)
    # growing to the size that fits takes some chunks; from there on what is free is used
    free = [gap for size, gap in zip(sizes[15:-1], gaps[15:-1]) if LEAST < size < PREFILL_CHUNK]
    one_more = machine.token + machine.context * 6000
    assert all(gap + one_more > 0.9 * max(ITL, SLOWDOWN * machine.decode) for gap in free)


def test_the_first_token_comes_a_third_later():
    """On a machine whose gaps may be five times the usual: the rest is the prompt's."""
    machine = MACHINES["a small model on two cores"]
    _, gaps = machine.read(ChunkSizer(PREFILL_CHUNK, ITL), 3000)
    _, whole = machine.read(ChunkSizer(PREFILL_CHUNK, None), 3000)
    assert len(whole) == 6 and sum(gaps) < 4 / 3 * sum(whole)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MACHINES)
def test_on_a_noisy_machine_most_gaps_are_short(name, seed):
    machine = dataclasses.replace(MACHINES[name], noise=0.2, seed=seed)
    _, gaps = machine.read(ChunkSizer(PREFILL_CHUNK, ITL), 5000)
    assert median(gaps) < 1.05 * limit(machine, 5000)
    assert sorted(gaps)[int(0.95 * len(gaps))] < 1.7 * limit(machine, 5000)


def test_a_disturbed_step_changes_nothing():
    machine, sizer = MACHINES["a small model on two cores"], ChunkSizer(PREFILL_CHUNK, ITL)
    machine.read(sizer, 600)
    before = sizer.tokens_in(sizer.spare)
    sizer.observe(40 * ITL, before)
    assert sizer.tokens_in(sizer.spare) > 0.95 * before
    sizer.observe(40 * ITL, 0)
    assert sizer.longest_gap == pytest.approx(ITL)


def test_a_prompt_gets_on_however_slow_the_machine_is():
    sizes, _ = Machine(0.001, 0.0, 9.0, 0.0).read(ChunkSizer(PREFILL_CHUNK, ITL), 100)
    assert sizes == [LEAST] * 6 + [4]
    assert ChunkSizer(4, ITL).tokens_in(ITL) == 4


def test_a_machine_that_becomes_slower_or_faster_is_followed():
    sizer = ChunkSizer(PREFILL_CHUNK, ITL)
    machine, slower = MACHINES["a small model on two cores"], Machine(0.012, 0.004, 0.0015, 1e-7)
    sizes, _ = machine.read(sizer, 2000)
    less, gaps = slower.read(sizer, 2000)
    assert less[CHUNKS] < 0.7 * max(sizes) and max(gaps[CHUNKS:]) <= ITL
    more, gaps = machine.read(sizer, 2000)
    assert max(more) > 2 * max(less[CHUNKS:]) and max(gaps) <= ITL


def test_what_runs_ahead_is_counted_where_it_is_waited_for():
    together, sizer = ChunkSizer(PREFILL_CHUNK, ITL), ChunkSizer(PREFILL_CHUNK, ITL)
    for one in (together, sizer):
        one.observe(0.01, 0)
    together.observe(0.03, 100)
    sizer.observe(0.01, 100, ahead=True)
    assert sizer.tokens_in(sizer.spare) == LEAST and sizer.longest_gap == ITL
    sizer.observe(0.03, 50, ahead=True)
    assert sizer.tokens_in(sizer.spare) == together.tokens_in(together.spare) == 187
    # of the second chunk nobody knows what it took
    sizer.skip()
    sizer.observe(0.01, 0, ahead=True)
    assert sizer.tokens_in(sizer.spare) == 187


# -- in the engine


class Timed(CpuModel):
    """A model that takes the time of another machine."""

    @classmethod
    def like(cls, model, machine):
        made = copy.copy(model)
        made.__class__ = cls
        made.machine, made.now, made.chunks = machine, 0.0, []
        return made

    def _take(self, counts, batch):
        read = [(count, start) for count, start, phase in zip(counts, batch.starts, batch.phases)
                if phase != "decode"]
        tokens = sum(count for count, _ in read)
        if tokens:
            self.chunks.append(tokens)
        if len(read) == len(counts):
            self.now -= self.machine.decode  # there is none
        self.now += self.machine.step(tokens, max((start for _, start in read), default=0))

    def forward(self, tokens, batch, wanted):
        self._take([*map(len, tokens)], batch)
        return super().forward(tokens, batch, wanted)

    def __call__(self, ids, positions=None, cache=None, last=None):
        self._take([ids.shape[1]], cache)
        return super().__call__(ids, positions, cache, last)

    def hidden(self, ids, positions=None, cache=None):
        self._take([ids.shape[1]], cache)
        return super().hidden(ids, positions, cache)


@pytest.fixture
def timed(small):
    """``timed(machine, **options)`` → an engine on it, its model, and what :func:`decoding` notes there."""
    def make(machine, loaded=small, **options):
        model = Timed.like(loaded.model, machine)
        return Engine(dataclasses.replace(loaded, model=model), clock=lambda: model.now, **options), model

    return make


def decoding(engine, model, submit, count):
    """Streams that have decoded for a while; returns the times of the first one's tokens."""
    times = []
    for index in range(count):
        submit(engine, 4, seed=index, on_token=lambda info, index=index: index or times.append(model.now))
    for _ in range(20):
        engine.step()
    return times


def gaps_of(times):
    return [other - one for one, other in itertools.pairwise(times)]


SLOW = Machine(0.009, 0.003, 0.0018, 1e-6)


def test_two_long_prompts_leave_short_gaps(timed, submit):
    engine, model = timed(SLOW, max_itl=ITL)
    times, one = decoding(engine, model, submit, 4), Sampling(max_tokens=1, ignore_eos=True)
    del model.chunks[:]
    submitted = [submit(engine, 200, one, seed=seed)[0] for seed in (7, 8)]
    while not all(request.done for request in submitted):
        engine.step()
    assert sum(model.chunks) == 400 and max(gaps_of(times)) <= ITL
    # of 1.8 ms each some 19 tokens fit
    assert len(model.chunks) < 30


def test_without_a_limit_a_prompt_goes_in_the_largest_chunks(timed, submit):
    engine, model = timed(SLOW)
    times = decoding(engine, model, submit, 4)
    submit(engine, 200)
    engine.step()
    assert model.chunks[-1] == 200 and max(gaps_of(times)) > 7 * ITL


def test_a_prompt_that_nobody_waits_for_goes_in_the_largest_chunks(timed, submit):
    engine, model = timed(SLOW, max_itl=ITL)
    request, _ = submit(engine, 200)
    engine.step()
    assert model.chunks == [200] and request.result.token_ids


def test_a_model_whose_results_depend_on_the_cut_keeps_its_chunks(submit, tmp_path):
    """A rotation of parts of heads goes operation by operation."""
    loaded = load(str(tiny_model(tmp_path, "phi3", partial_rotary_factor=0.5)))
    assert loaded.fallback_reason
    engine = Engine(loaded, max_itl=0.0)
    submit(engine, 4)
    for _ in range(5):
        engine.step()
    request, _ = submit(engine, 200)
    engine.step()
    assert request.result.token_ids


def test_what_a_policy_does_at_the_end_of_a_prompt_leaves_short_gaps(timed, submit, monkeypatch, tmp_path):
    """A layer after another, as many as fit between two tokens."""
    acts, act = [], KVCache.drop
    loaded = load(str(tiny_model(tmp_path / "m", "qwen3", num_hidden_layers=8)))
    engine, model = timed(SLOW, loaded, max_itl=ITL, kv=parse_kv("snapkv(0.5)"))

    def slow(cache, layer, held):
        model.now += 0.015
        acts.append(layer)
        act(cache, layer, held)

    monkeypatch.setattr(KVCache, "drop", slow)
    times = decoding(engine, model, submit, 2)
    acts.clear()
    del times[:-1]
    request, _ = submit(engine, 100)
    while not request.result.token_ids:
        engine.step()
    assert acts == list(range(8)) and max(gaps_of(times)) <= ITL


def test_a_prompt_that_comes_again_leaves_short_gaps(timed, submit):
    engine, model = timed(SLOW, max_itl=ITL, kv=parse_kv("kvzip(0.5)+int4"))
    times = decoding(engine, model, submit, 2)
    del model.chunks[:]
    request, _ = submit(engine, 200)
    while not request.result.token_ids:
        engine.step()
    assert sum(model.chunks) == 400 and max(gaps_of(times)) <= ITL


def test_a_chunk_behind_what_a_policy_did_is_sized_for_what_is_left_of_the_gap():
    sizer = ChunkSizer(PREFILL_CHUNK, ITL)
    for _ in range(20):
        sizer.observe(SLOW.step(), 0)
        sizer.observe(SLOW.step(16), 16)
    whole, left = sizer.tokens_in(sizer.spare), sizer.tokens_in(sizer.spare / 2)
    assert LEAST <= left < whole <= 32
    assert ChunkSizer(PREFILL_CHUNK, None).tokens_in(0.0) == PREFILL_CHUNK


@pytest.mark.parametrize("kv", ["snapkv(0.5)", "kvzip(0.5)+int4"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_who_leaves_at_the_end_of_its_prompt_leaves_nothing(timed, submit, kv, how, monkeypatch):
    engine, model = timed(SLOW, max_itl=ITL, kv=parse_kv(kv))
    decoding(engine, model, submit, 2)
    before, errors = engine.cache.numbers, []
    request, ends = submit(engine, 200, on_error=errors.append)
    while request.kv.computed_tokens < 200:
        engine.step()
    monkeypatch.setattr(ChunkSizer, "spare", -1.0)  # one layer, or one chunk, a step
    engine.step()
    assert not request.result.token_ids and len(engine.cache.numbers) == 3 + ("kvzip" in kv)
    if how == "cancelled":
        request.cancel()
        engine.step()
    else:
        def broken(*given):
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "drop", broken)
            while not request.done:
                engine.step()
    assert (ends, [str(one) for one in errors]) == (
        (["cancelled"], []) if how == "cancelled" else ([], ["broken"]))
    assert engine.cache.numbers == before and engine.stats()["running"] == 2
    engine.close()
    assert engine.cache.used_bytes == 0


def test_a_prompt_that_comes_before_the_usual_gap_is_known_waits_for_two_steps(timed, submit):
    """Without it every gap of a slow machine would look as if its chunk alone took so long."""
    engine, model = timed(Machine(0.1, 0.0, 0.002, 0.0), max_itl=ITL)
    submit(engine, 4)
    engine.step()
    submit(engine, 200)
    for _ in range(40):
        engine.step()
    assert sum(model.chunks) >= 200 and max(model.chunks) > LEAST


def test_the_usual_gap_is_that_of_as_many_sequences():
    """With more of them everything takes longer, which isn't the prompt's doing; and it is measured again."""
    sizer = ChunkSizer(PREFILL_CHUNK, ITL)
    sizer.begin(2)
    for _ in range(20):
        sizer.observe(0.004, 0)
    assert not sizer.blind and sizer.longest_gap == ITL
    sizer.begin(2)
    assert not sizer.blind
    sizer.begin(16)
    assert sizer.blind, "steps without a chunk come first"
    sizer.observe(0.5, 0)
    assert sizer.blind, "that one may have been disturbed"
    sizer.observe(0.03, 0)
    assert not sizer.blind and sizer.longest_gap == pytest.approx(SLOWDOWN * 0.03)
    for _ in range(REFRESH):
        assert not sizer.blind
        sizer.begin(17)
        sizer.observe(0.08, 64)
    assert sizer.blind and sizer.longest_gap == pytest.approx(SLOWDOWN * 0.03)
    sizer.observe(0.032, 0)
    assert not sizer.blind


# -- however a prompt is cut into chunks beside others that decode, its request gets the same bits

@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """Two layers in bfloat16 that run as a program, and a context for more than a few chunks."""
    folder = tmp_path_factory.mktemp("chunks")
    return load(str(tiny_model(folder / "m", "qwen3", max_position_embeddings=2048)))


KV = ("none", "int8", "int4", "int2", "rotation(4)", "window(70, sinks=2)", "window(70, sinks=2)+int8",
      "window(70)+int2", "snapkv(0.4, window=8)+int4", "adakv(0.4)", "pyramidkv(60, window=8)",
      "tova(90, interval=3)", "h2o(0.4)", "h2o(100)+int2", "expected(0.4)", "kvzip(0.4)+int4",
      "kvzip(100, chunk=128)")


def run(loaded, kv, prompt, seed, monkeypatch):
    """Tokens and exact log-probabilities of a request, alone (``seed`` is ``None``) or cut by chance beside
    others."""
    heard, engine = [], Engine(loaded, kv=parse_kv(kv), max_itl=1.0)
    if seed is not None:
        draw = random.Random(seed)
        monkeypatch.setattr(ChunkSizer, "tokens_in",
                            lambda self, seconds: draw.choice((1, 3, 16, 40, 64, 100)))
        engine.submit(prompt[:9], Sampling(max_tokens=400, ignore_eos=True))
        engine.step()
    request = engine.submit(prompt, Sampling(max_tokens=12, ignore_eos=True), logprobs=2,
                           on_token=heard.append)
    steps = 0
    while not request.done:
        engine.step()
        steps += not heard
    engine.close()
    assert steps > 4 if seed is not None else steps == 2
    return heard


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", KV)
def test_tokens_do_not_depend_on_the_cut(long_model, kv, prompt_of, monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", 256)
    prompt = prompt_of(600)
    whole = run(long_model, kv, prompt, None, monkeypatch)
    for seed in range(3):
        assert run(long_model, kv, prompt, seed, monkeypatch) == whole
