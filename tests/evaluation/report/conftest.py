"""Results that no model had to run for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.result import EvalResult, ModelResult

from .rich import rich_result


@pytest.fixture
def make_row() -> Callable[..., ModelResult]:
    """``make_row("name", mb=…, ppl=…, kl=…, decode=…)``."""

    def around(value: float, top: float = float("inf")) -> Interval:
        return Interval(value, value * 0.93, min(value * 1.08, top))

    def make(model: str, method: str = "rtn int8 channel sym", *, mb: float = 163, ppl: float = 28.8,
             kl: float = 0.004, top1: float = 0.975, prefill: float | None = 410,
             decode: float | None = 45, bits: float = 8.02, answer: str | None = None) -> ModelResult:
        metrics = {"perplexity": around(ppl), "kl_mean": around(kl), "top1": around(top1, 1.0)}
        if prefill is not None and decode is not None:
            metrics |= {"prefill_tok_s": around(prefill), "decode_tok_s": around(decode)}
        return ModelResult(model, method, bits, int(mb * 1e6), peak_bytes=int(7e8), load_s=0.3,
                           metrics=metrics, kernels={"prefill": {"torch": 210}, "decode": {"reference": 210}},
                           answer=answer)

    return make


@pytest.fixture
def make_result(make_row: Callable[..., ModelResult]) -> Callable[..., EvalResult]:
    """``make_result(rows)``; by default a typical four. ``exact``: KL from float32 arithmetic of each."""

    def make(rows: list[ModelResult] | None = None, exact: Sequence[Interval] = (),
             **extra: Any) -> EvalResult:
        protocol = Protocol(
            text="pydoc-topics-3.11", text_sha256="ab" * 32, tokens_sha256="cd" * 32, window=512, windows=8,
            words=3000, dtype="bfloat16", prefill=256, decode=24, repeats=3, quantkit="0.1.0",
            torch="2.13.0+cpu", cpu="Some(R) Processor with a Long Name @ 2.60GHz", cores=2, threads=2)
        rows = rows if rows is not None else [
            make_row("smollm2", "bf16", mb=269, ppl=28.7, kl=0, top1=1, prefill=300, decode=30, bits=16),
            make_row("demo/int8", answer="Light scatters."),
            make_row("demo/int4", "gptq int4 g64 sym", mb=112, ppl=37, kl=0.25, top1=0.78, decode=25,
                     bits=4.25),
            make_row("demo/nf4", "nf4 b64", mb=116, ppl=38, kl=0.27, top1=0.77, decode=4, bits=4.5)]
        for row, found in zip(rows, exact):
            row.metrics["kl_exact"] = found
        return EvalResult(protocol, rows, **extra)

    return make


@pytest.fixture
def rich() -> EvalResult:
    """Everything that can be measured, of five models with three KV settings each."""
    return rich_result()
