"""Prefill and decoding of a model by batch, context and KV setting, beside the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from quantkit.bench.ceilings import bandwidth
from quantkit.bench.machine import machine
from quantkit.errors import QuantkitError, UsageError
from quantkit.evaluate.text import load_text
from quantkit.kv.base import PAGE, Phase
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.footprint import footprint
from quantkit.progress import Listener, ProgressEvent, silent
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.engine import PREFILL_CHUNK
from quantkit.runtime.gpu.memory import spare_bytes
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampler, Sampling, sample_async, sample_tokens, samples_on_device
from quantkit.spec import KVSpec
from quantkit.units import human_bytes
from quantkit_kernels import tuned

WARM_UP = 2
"""Tokens before those that are timed."""


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured.

    Attributes:
        batches: sequences that decode side by side.
        contexts: tokens that each holds before.
        kv: KV settings.
        prompt: tokens of the prefill that is timed, from an empty cache; 0: none is.
        tokens: decoded in a timed run.
        repeats: timed runs; read bandwidth is measured before each.
        fallback: whether operations that torch runs are accepted.
        pdl: whether a GPU's products begin before the kernel before them has ended (programmatic dependent
            launch); else only where that was measured to be faster.
    """

    batches: Sequence[int] = (1,)
    contexts: Sequence[int] = (0,)
    kv: Sequence[KVSpec] = (KVSpec(),)
    prompt: int = 512
    tokens: int = 64
    repeats: int = 3
    fallback: bool = True
    pdl: bool = False


def bench_decode(loaded: LoadedModel, settings: DecodeSettings, progress: Listener = silent,
                 keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Measure a model.

    Args:
        loaded: the model.
        settings: what.
        progress: told of every run.
        keep: given what is known so far after every case, so that a run that is stopped leaves something.

    Returns:
        ``machine``, ``model``, ``label``, ``bytes`` (read a step, KV aside), ``kernels`` (by Linear, in
        decoding), ``prefill`` and ``cases`` (``kv_bytes``: a sequence's pages at its context's end; or
        ``left_out``, why one isn't measured); speeds are medians with their range.

    Raises:
        UsageError: a context doesn't fit the model, or, without fallback, torch would run something.
    """
    limit = loaded.config.max_position_embeddings
    if (longest := max([*settings.contexts, settings.prompt]) + settings.tokens) > limit:
        raise UsageError(f"a context of {longest} tokens is asked for", why=f"the model was made for {limit}",
                         next="give a smaller --context, or fewer --tokens")
    if not settings.fallback:
        for kv in settings.kv:
            if (reason := _falls_back(loaded, kv)) is not None:
                raise UsageError(f"{loaded.uri} with --kv {kv} falls back to torch", why=reason,
                                 next="leave out --no-fallback to measure it all the same")
    names = {name: linear.weight.kernel_name(loaded.dtype, loaded.model.device, "decode")
             for name, linear in loaded.model.linears().items()}
    tokens = loaded.tokenizer.encode(load_text().content[:16 * limit])
    ids = (tokens * -(-limit // len(tokens)))[:limit]  # what is read has no influence on speed
    runs = len(settings.kv) * (1 + len(settings.batches) * len(settings.contexts)) * settings.repeats
    report: dict[str, Any] = {"machine": machine(loaded.model.device), "model": loaded.uri,
                              "label": loaded.label, "bytes": step_bytes(loaded), "kernels": names,
                              "unfused": loaded.fallback_reason, "pdl": settings.pdl, "prefill": [],
                              "cases": []}
    runner = _Runner(loaded, ids, settings, progress, runs)
    with torch.inference_mode(), tuned.trial({"pdl": 1}) if settings.pdl else nullcontext():
        for kv in settings.kv:
            if settings.prompt:
                report["prefill"].append(runner.prefill(kv))
                keep(report)
            for context in settings.contexts:
                for batch in settings.batches:
                    report["cases"].append(runner.decode(kv, batch, context))
                    keep(report)
    return report


def step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that one decode step reads: all Linears and the head."""
    if isinstance(loaded.model, CpuModel | GpuModel):
        return loaded.model.step_bytes
    return loaded.weight_bytes


def _finite(tokens: list[int | QuantkitError]) -> list[int]:
    """Tokens. Raises QuantkitError: there is none."""
    for token in tokens:
        if isinstance(token, QuantkitError):
            raise token
    return [token for token in tokens if isinstance(token, int)]


def _falls_back(loaded: LoadedModel, kv: KVSpec) -> str | None:
    if not isinstance(loaded.model, CpuModel | GpuModel):
        return loaded.fallback_reason
    cache = KVCache(loaded.config, kv, loaded.dtype, loaded.model.device)
    phases: tuple[Phase, ...] = ("prefill", "prefill_end", "decode")
    for phase in phases:
        if (reason := loaded.model.declines(Batch(cache, [], phase))) is not None:
            return reason
    if isinstance(loaded.model, CpuModel) and not cpu_model.has_kernels(cache):
        return "no kernel reads its codec: torch encodes, and attention reads decoded pages"
    return None


class _Runner:
    def __init__(self, loaded: LoadedModel, ids: list[int], settings: DecodeSettings, progress: Listener,
                 runs: int) -> None:
        self._loaded, self._ids, self._settings = loaded, ids, settings
        self._progress, self._runs, self._done = progress, runs, 0
        self._greedy = Sampler(Sampling())
        self._device, self._bandwidth = loaded.model.device, bandwidth(loaded.model.device)

    def prefill(self, kv: KVSpec) -> dict[str, Any]:
        """A prompt from an empty cache, after one that nobody times."""
        length, speeds = self._settings.prompt, []
        for run in range(self._settings.repeats + 1):
            cache = self._cache(kv)
            begin = time.perf_counter()
            self._feed(cache, cache.add(length), length)
            if run:
                speeds.append(length / (time.perf_counter() - begin))
                self._tell(f"prefill {kv}")
        return {"kv": str(kv), "tokens": length, "tok_s": spread(speeds)}

    def decode(self, kv: KVSpec, batch: int, context: int) -> dict[str, Any]:
        """Sequences with the same context decode greedily, each on its own."""
        if (reason := self._too_large(kv, batch, context)) is not None:
            return {"kv": str(kv), "batch": batch, "context": context, "left_out": reason}
        cache = self._cache(kv)
        first = cache.add(context + self._settings.tokens)
        token = self._feed(cache, first, max(1, context))
        held_bytes = cache.bytes_of(first)
        speeds, shares, reads = [], [], []
        for run in range(self._settings.repeats + 1):
            rows = [cache.fork(first, shared=False) for _ in range(batch)]
            for pages in cache.pools:  # none is to move
                pages.keep(pages.used + batch * cache.heads * (2 + self._settings.tokens // PAGE))
            reads.append(self._bandwidth())
            before = cache.step_bytes(rows[0])  # layers with a window don't grow
            spent = self._steps(cache, rows, [token] * batch)
            after = cache.step_bytes(rows[0])
            tokens = self._settings.tokens
            mean_length = after - (after - before) / (tokens + WARM_UP) * tokens / 2
            moved = step_bytes(self._loaded) + batch * mean_length
            if run:
                speeds.append(batch * self._settings.tokens / spent)
                shares.append(moved * self._settings.tokens / spent)
                self._tell(f"decode {kv}, batch {batch}, context {context}")
            cache.free(rows)
        read = median(reads)
        return {"kv": str(kv), "batch": batch, "context": context, "kv_bytes": held_bytes,
                "tok_s": spread(speeds),
                "bytes_s": spread(shares), "read_bytes_s": spread(reads),
                "of_read": median(shares) / read if read else None}

    def _cache(self, kv: KVSpec) -> KVCache:
        return KVCache(self._loaded.config, kv, self._loaded.dtype, self._device)

    def _too_large(self, kv: KVSpec, batch: int, context: int) -> str | None:
        """Why these sequences don't fit beside the model on a GPU. One more is the one that all are copies
        of, and blocks of pages are there twice while they grow."""
        if (room := spare_bytes(self._loaded.model, self._cache(kv), batch + 1, PREFILL_CHUNK)) is None:
            return None
        end = context + self._settings.tokens + WARM_UP
        memory = footprint(self._loaded.config, kv, self._loaded.dtype, end, max(1, context), PREFILL_CHUNK)
        needed = memory.allocated_bytes(batch + 1) + memory.moving_bytes(batch + 1)
        return None if needed <= room else (
            f"its KV cache takes {human_bytes(needed)}, {human_bytes(room)} are left")

    def _feed(self, cache: KVCache, row: int, length: int) -> int:
        """Read a prompt; the most likely token after it."""
        logits = torch.empty(0)
        for start in range(0, length, PREFILL_CHUNK):
            chunk = self._ids[start:min(start + PREFILL_CHUNK, length)]
            batch = Batch(cache, [row], "prefill_end" if start + len(chunk) == length else "prefill")
            logits = self._loaded.model(torch.tensor([chunk], device=self._device), cache=batch,
                                        last=torch.tensor([len(chunk) - 1]))
        return self._best(logits)[0]

    def _steps(self, cache: KVCache, rows: list[int], tokens: list[int]) -> float:
        """Seconds for the timed tokens, after some that warm up."""
        begin, samplers, flying = time.perf_counter(), [self._greedy] * len(rows), None
        for step in range(self._settings.tokens + WARM_UP):
            if step == WARM_UP:
                if flying is not None:
                    flying.tokens()
                begin = time.perf_counter()
            batch = Batch(cache, rows, "decode")
            ids = torch.tensor([[token] for token in tokens]) if flying is None else flying.ids[:, None]
            logits = self._loaded.model(ids.to(self._device), cache=batch)[:, -1]
            if not samples_on_device(logits, samplers):
                tokens = self._best(logits)
                continue
            flying, before = sample_async(logits,
                                          samplers), flying  # as the engine does: nobody waits for a step
            if before is not None:
                _finite(before.tokens())
        if flying is not None:
            _finite(flying.tokens())
        return time.perf_counter() - begin

    def _best(self, logits: torch.Tensor) -> list[int]:
        """The most likely token of every row."""
        return _finite(sample_tokens(logits, [self._greedy] * len(logits), [[]] * len(logits)))

    def _tell(self, label: str) -> None:
        self._done += 1
        self._progress(ProgressEvent(self._done, self._runs, label))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "low": min(values), "high": max(values)}
