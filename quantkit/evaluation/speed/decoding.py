"""Times prefill and decoding of a loaded model by batch, context and KV setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from quantkit.evaluation.quality.feed import prefill
from quantkit.evaluation.roofline.ceilings import DeviceCeilings
from quantkit.evaluation.speed.results import DecodeSpeed, PrefillSpeed, Spread
from quantkit.kv.base import PAGE
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.kv import footprint
from quantkit.runtime.memory.machine import available_memory
from quantkit.runtime.memory.scratch import prompt_portion
from quantkit.runtime.memory.serving import spare_bytes
from quantkit.runtime.sampler import Sampler, Sampling, can_sample_on_device, sample_async, sample_tokens
from quantkit.support.errors import QuantkitError
from quantkit.support.units import human_bytes

WARM_UP = 2
"""Tokens before those that are timed."""
LEAST_TOKENS = 4
"""Tokens of a timed run, at least, however long they take, and of the run before them; fewer only where fewer
are asked for."""


def step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that one decode step reads: all Linears and the head."""
    if isinstance(loaded.model, CpuModel | GpuModel):
        return loaded.model.step_bytes
    return loaded.weight_bytes


def weights_in_memory(loaded: LoadedModel) -> int:
    """Bytes of all weights as they lie in memory. Where no program runs the model: before kernels repack
    them. Of a GGUF file that was decoded to be compared with: what it takes otherwise."""
    model = loaded.model
    if isinstance(model, CpuModel | GpuModel) and not loaded.decoded:
        return model.weight_bytes
    return loaded.weight_bytes


def _linears(loaded: LoadedModel) -> list[CpuWeight]:
    """What all tokens of a prompt are multiplied by, which isn't the head; none where a token chooses
    experts."""
    if loaded.config.experts is not None:
        return []
    weights = [linear.weight for name, linear in loaded.model.linears().items() if name != "lm_head"]
    return [weight for weight in weights if isinstance(weight, CpuWeight)]


class DecodeRunner:
    """Runs a model on a cache of its own, without an engine.

    Args:
        loaded: the model in memory.
        ids: tokens of a text, repeated where it is shorter than the model's context: what is read has no
            influence on speed.
        tokens: decoded in a timed run.
        repeats: timed runs, after one that isn't; the ceilings are measured before each.
        case_s: seconds of a case, as in :class:`~quantkit.evaluation.speed.results.SweepSettings`; ``None``:
            a run takes as long as it takes.
        tell: told what was run, after each timed run.

    Attributes:
        loaded: the model that is timed.
        ceilings: the limits of its device, as this run measures them.
    """

    def __init__(self, loaded: LoadedModel, ids: Sequence[int], *, tokens: int, repeats: int,
                 case_s: float | None = None, tell: Callable[[str], None] = lambda label: None) -> None:
        limit = loaded.config.max_position_embeddings
        self.loaded = loaded
        self._tokens = tokens
        self._repeats = repeats
        self._case_s = case_s
        self._ids = (list(ids) * -(-limit // len(ids)))[:limit]
        self._tell, self._greedy = tell, Sampler(Sampling())
        self._device = loaded.model.device
        self.ceilings = DeviceCeilings(self._device)

    @torch.inference_mode()
    def prefill(self, kv: KVSpec, length: int) -> PrefillSpeed:
        """A prompt from an empty cache, after one that nobody times."""
        speeds = []
        weights = _linears(self.loaded)
        for run in range(self._repeats + 1):
            self.ceilings.multiply(weights)
            cache = self.cache(kv)
            if self._device.type != "cpu":  # where pages exist from the beginning
                keep_pages(cache, 1, length)
            begin = time.perf_counter()
            self.feed(cache, cache.add(length), length)
            if run:
                speeds.append(length / (time.perf_counter() - begin))
                self._tell(f"prefill {kv}")
        speed = Spread.of(speeds)
        least = self.ceilings.least_seconds(weights)
        return PrefillSpeed(tokens=length, tok_s=speed, runs=len(speeds),
                            of_products=speed.median * least if least else None)

    def decode(self, kv: KVSpec, batches: Sequence[int], context: int) -> Iterator[DecodeSpeed]:
        """Sequences with the same context decode greedily, each on its own. The context is read once,
        or random.

        Yields:
            For each batch its speed, or why it doesn't fit into memory.
        """
        reasons = [self._too_large(kv, batch, context) for batch in batches]  # while there is no cache
        if all(reasons):
            yield from (DecodeSpeed(batch=batch, context=context, left_out=reason)
                        for batch, reason in zip(batches, reasons))
            return
        with torch.inference_mode():
            cache = self.cache(kv)
            first = cache.add(context + self._tokens)
            token = self.hold(cache, first, max(1, context))
        for batch, reason in zip(batches, reasons):
            if reason is not None:
                yield DecodeSpeed(batch=batch, context=context, left_out=reason)
                continue
            yield self._case(cache, first, token, batch, context)

    @torch.inference_mode()
    def _case(self, cache: KVCache, first: int, token: int, batch: int, context: int) -> DecodeSpeed:
        context_bytes = cache.bytes_of(first)
        speeds = []
        rates = []
        counts = []
        begin = time.perf_counter()
        # copying pages takes longer than decoding: where tokens can be taken back, it is done once
        rows, reuse = list[int](), cache.divisible
        for run in range(self._repeats + 1):
            if not rows:
                rows = [cache.fork(first, shared=False) for _ in range(batch)]
                keep_pages(cache, batch, self._tokens)
            self.ceilings.read()
            before = cache.step_bytes(rows[0])  # layers with a window don't grow
            limit = self._tokens if run else min(LEAST_TOKENS, self._tokens)
            spent, tokens = self.steps(cache, rows, [token] * batch, limit)
            after = cache.step_bytes(rows[0])
            mean_length = after - (after - before) / (tokens + WARM_UP) * tokens / 2
            moved = step_bytes(self.loaded) + batch * mean_length
            for row in rows if reuse else ():
                cache.take_back(row, tokens + WARM_UP)
            if not reuse:
                cache.free(rows)
                rows = []
            if run:
                speeds.append(batch * tokens / spent)
                rates.append(moved * tokens / spent)
                counts.append(tokens)
                self._tell(f"decode {cache.spec}, batch {batch}, context {context}")
            if run and self._case_s is not None and time.perf_counter() - begin >= self._case_s:
                break
        cache.free(rows)
        return DecodeSpeed(batch=batch, context=context, kv_bytes=context_bytes, tok_s=Spread.of(speeds),
                           bytes_s=Spread.of(rates), runs=len(speeds), tokens=min(counts))

    def cache(self, kv: KVSpec) -> KVCache:
        """An empty one for this model."""
        return KVCache(self.loaded.config, kv, self.loaded.dtype, self._device)

    def _too_large(self, kv: KVSpec, batch: int, context: int) -> str | None:
        """Why these sequences don't fit beside the model. One more is the one that all are copies of, and
        blocks of pages are there twice while they grow."""
        model = self.loaded.model
        cache = self.cache(kv)
        portion = prompt_portion(model, cache)
        room = (available_memory() if model.device.type == "cpu"
                else spare_bytes(model, cache, batch + 1, portion))
        if room is None:
            return None
        end = context + self._tokens + WARM_UP
        memory = footprint(self.loaded.config, kv, self.loaded.dtype, end, max(1, context), portion)
        needed = memory.allocated_bytes(batch + 1) + memory.moving_bytes(batch + 1)
        return None if needed <= room else (
            f"its KV cache takes {human_bytes(needed)}, {human_bytes(room)} are left")

    @torch.inference_mode()
    def feed(self, cache: KVCache, row: int, length: int) -> int:
        """Read a prompt; the most likely token after it."""
        return self._best(prefill(self.loaded, cache, row, self._ids[:length]))[0]

    def hold(self, cache: KVCache, row: int, length: int) -> int:
        """Let a sequence hold a context; returns a token that follows. On a GPU its keys and values are
        random where nothing is dropped, because reading 128,000 tokens takes longer than what is measured."""
        if self._device.type == "cpu" or not cache.keeps_all:
            return self.feed(cache, row, length)
        fill_at_random(cache, row, length)
        return self._ids[0]

    def steps(self, cache: KVCache, rows: list[int], tokens: list[int], limit: int) -> tuple[float, int]:
        """Seconds for ``limit`` tokens, or fewer if they take long, after some that warm up; and how many."""
        begin = time.perf_counter()
        samplers = [self._greedy] * len(rows)
        flying = None
        timed = 0
        for step in range(limit + WARM_UP):
            if step == WARM_UP:
                if flying is not None:
                    flying.tokens()
                begin = time.perf_counter()
            batch = Batch(cache, rows, "decode")
            ids = torch.tensor([[token] for token in tokens]) if flying is None else flying.ids[:, None]
            logits = self.loaded.model(ids.to(self._device), cache=batch)[:, -1]
            if not can_sample_on_device(logits, samplers):
                tokens = self._best(logits)
            else:
                # as the engine does: nobody waits for a step
                flying, before = sample_async(logits, samplers, [[]] * len(samplers)), flying
                if before is not None:
                    _finite(before.tokens())
            timed = step + 1 - WARM_UP
            if (self._case_s is not None and timed >= LEAST_TOKENS
                    and time.perf_counter() - begin > self._case_s / 2):
                break
        if flying is not None:
            _finite(flying.tokens())
        return time.perf_counter() - begin, timed

    def _best(self, logits: torch.Tensor) -> list[int]:
        """The most likely token of every row."""
        return _finite(sample_tokens(logits, [self._greedy] * len(logits), [[]] * len(logits)))


def keep_pages(cache: KVCache, sequences: int, tokens: int) -> None:
    """Take memory for more tokens of each of some sequences, so that no page moves."""
    for pages in cache.pools:
        pages.preallocate(pages.used + sequences * cache.heads * (2 + tokens // PAGE))


def _finite(tokens: list[int | QuantkitError]) -> list[int]:
    """Tokens. Raises QuantkitError: there is none."""
    for token in tokens:
        if isinstance(token, QuantkitError):
            raise token
    return [token for token in tokens if isinstance(token, int)]


PAGES = 64
"""Pages of random vectors that are encoded; all pages hold what one of them does."""
STEP = 2048
"""Tokens for which pages are taken at a time: vectors that wait for the rest of their page have pages too."""


def fill_at_random(cache: KVCache, number: int, length: int) -> None:
    """Let an empty sequence, the only one of a cache whose policies drop nothing, hold ``length`` tokens."""
    state = cache.sequence(number)
    for begin in range(0, length, STEP):
        count = min(STEP, length - begin)
        cache.reserve(state, count)
        cache.advance(state, count)
    generator = torch.Generator(cache.device).manual_seed(0)
    for layer in cache.layers:
        dim = layer.geometry.config.head_dim
        k, v = (torch.randn(PAGES, PAGE, dim, generator=generator, dtype=torch.float32,
                            device=cache.device).to(cache.dtype) for _ in range(2))
        encoded = [layer.store.encode(k, v), {"k.values": k, "v.values": v}]
        for pool, values in zip(layer.store.all, encoded):
            for name, part in pool.parts.items():
                value = values[name].to(part.dtype)
                for at in range(0, len(part), PAGES):
                    part[at:at + PAGES].copy_(value[:len(part) - at])
