"""Prefill and decoding of a model by batch, context and KV setting, beside the memory's bandwidth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.speed.decoding import DecodeRunner, step_bytes
from quantkit.evaluation.speed.results import DecodeSpeed
from quantkit.evaluation.text import load_text
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit_kernels import tuned


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured.

    Attributes:
        batches: sequences that decode side by side.
        contexts: tokens that each holds before.
        kv: the KV settings to measure.
        prompt: tokens of the prefill that is timed, from an empty cache; 0: none is.
        tokens: decoded in a timed run.
        repeats: timed runs; the ceilings are measured before each.
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
        loaded: the model in memory.
        settings: the choice of measurements.
        progress: told of every run.
        keep: given what is known so far after every case, so that a run that is stopped leaves something.

    Returns:
        ``machine``, ``model``, ``label``, ``bytes`` (read a step, KV aside), ``kernels`` (by Linear, in
        decoding), ``read_bytes_s`` and ``mac_s`` (the ceilings of this run, the second by arithmetic),
        ``prefill`` and ``cases`` (``kv_bytes``: a sequence's pages at its context's end; or ``left_out``, why
        one isn't measured); speeds are medians with their range.

    Raises:
        UsageError: a context doesn't fit the model, it writes blocks, or, without fallback, torch would run
            something.
    """
    if loaded.config.diffusion is not None:
        raise UsageError(f"{loaded.uri} writes blocks, and has no speed of token after token",
                         why="how fast it is depends on the steps that its blocks take",
                         next=f"quantkit generate {loaded.uri} PROMPT --blocks steps=4")
    limit = loaded.config.max_position_embeddings
    if (longest := max([*settings.contexts, settings.prompt]) + settings.tokens) > limit:
        raise UsageError(f"a context of {longest} tokens is asked for", why=f"the model was made for {limit}",
                         next="give a smaller --context, or fewer --max-tokens")
    if not settings.fallback:
        for kv in settings.kv:
            if (reason := _falls_back(loaded, kv)) is not None:
                raise UsageError(f"{loaded.uri} with --kv {kv} falls back to torch", why=reason,
                                 next="leave out --no-fallback to measure it all the same")
    names = {name: linear.weight.kernel_name(loaded.dtype, loaded.model.device, "decode")
             for name, linear in loaded.model.linears().items()}
    ids = loaded.tokenizer.encode(load_text().content[:16 * limit])
    runs = len(settings.kv) * (1 + len(settings.batches) * len(settings.contexts)) * settings.repeats
    report: dict[str, Any] = {"machine": machine(loaded.model.device), "model": loaded.uri,
                              "label": loaded.label, "bytes": step_bytes(loaded), "kernels": names,
                              "unfused": loaded.fallback_reason, "pdl": settings.pdl, "prefill": [],
                              "cases": []}
    done = itertools.count(1)
    runner = DecodeRunner(loaded, ids, tokens=settings.tokens, repeats=settings.repeats,
                          tell=lambda label: progress(ProgressEvent(next(done), runs, label)))
    measured = list[tuple[KVSpec, DecodeSpeed]]()

    def tell() -> None:
        read = runner.ceilings.read_bytes_s
        report["read_bytes_s"] = None if read is None else read.median
        report["mac_s"] = runner.ceilings.mac_s
        report["cases"] = [_plain(kv, case.below(read)) for kv, case in measured]
        keep(report)

    with tuned.trial({"pdl": 1}) if settings.pdl else nullcontext():
        for kv in settings.kv:
            if settings.prompt:
                prefill = runner.prefill(kv, settings.prompt)
                report["prefill"].append({"kv": str(kv), **prefill.model_dump(exclude_none=True)})
                tell()
            for context in settings.contexts:
                for case in runner.decode(kv, settings.batches, context):
                    measured.append((kv, case))
                    tell()
    return report


def _plain(kv: KVSpec, case: DecodeSpeed) -> dict[str, Any]:
    """A case for ``--json``: its figures, or why it is left out."""
    if case.left_out is not None:
        return {"kv": str(kv), **case.model_dump(exclude_none=True)}
    return {"kv": str(kv), **case.model_dump(exclude={"left_out"})}


def _falls_back(loaded: LoadedModel, kv: KVSpec) -> str | None:
    if not isinstance(loaded.model, CpuModel | GpuModel):
        return loaded.fallback_reason
    cache = KVCache(loaded.config, kv, loaded.dtype, loaded.model.device)
    if (reason := loaded.model.reason_against(cache)) is not None:
        return reason
    if isinstance(loaded.model, CpuModel) and not cpu_model.has_kernels(cache):
        return "no kernel reads its codec: torch encodes, and attention reads decoded pages"
    return None
