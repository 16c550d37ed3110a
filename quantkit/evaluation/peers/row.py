"""What was measured of a peer, as plain data that can be kept, and the row that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from quantkit.evaluation.metric_table import RegisteredMetric, registered_metrics, summarized
from quantkit.evaluation.metrics import TOP1, Interval
from quantkit.evaluation.peers.base import PeerFacts, PeerTimes
from quantkit.evaluation.quality.token_scores import SCORES, TokenScores, joined, tails
from quantkit.evaluation.result import ModelResult
from quantkit.evaluation.speed.results import DecodeSpeed, MemoryUse, PrefillSpeed, SpeedSweep, Spread
from quantkit.evaluation.sweep.store import MeasuredData, MeasurementResult

FLIPS = "flips"


class PeerData(MeasuredData):
    """What was measured of a peer. Beside it stand arrays: of each text with logits ``TEXT/kl`` and so on.

    Attributes:
        uri: the name of its model.
        facts: everything that the tool says about itself.
        texts: name → metric → its mean over each window.
        times: the times of its runs; ``None``: it wasn't timed.
        prefill: tokens of the prompt of those runs.
    """

    uri: str
    facts: PeerFacts
    texts: dict[str, dict[str, list[Any]]] = Field(default_factory=dict)
    times: PeerTimes | None = None
    prefill: int = 0


def peer_row(measurement: MeasurementResult[PeerData]) -> ModelResult:
    """The row of a peer: what the tool can't report is ``None`` or absent."""
    data = measurement.data
    facts = data.facts
    row = ModelResult(data.uri, facts.method, facts.bits_per_weight, facts.file_bytes, tool=facts.tool,
                      load_s=facts.load_s)
    metrics = {registered.metric.name: registered for registered in registered_metrics()}
    texts = data.texts
    scores = {name: TokenScores.of_arrays(measurement.arrays, f"{name}/") for name in texts
              if f"{name}/{SCORES[0]}" in measurement.arrays}
    for name, means in texts.items():
        row.texts[name] = _summary([means], metrics, [scores[name]] if name in scores else [])
        row.window_means[name] = {key: list(values) for key, values in means.items()
                                  if metrics[key].metric.per != "run"}
        if TOP1.name in means:
            row.window_means[name][FLIPS] = [1 - mean for mean in means[TOP1.name]]
    if texts:
        row.metrics |= _summary(list(texts.values()), metrics,
                                list(scores.values()) if len(scores) == len(texts) else [])
    if data.times is not None:
        _add_speed(row, data.times, facts, data.prefill)
    row.measured = dict.fromkeys(("quality", "speed") if row.speed else ("quality",), measurement.measured)
    return row


def _summary(texts: Sequence[Mapping[str, Any]], metrics: Mapping[str, RegisteredMetric],
             scores: list[TokenScores]) -> dict[str, Interval]:
    """Over all windows of these texts; the tails if there is every token's KL, else flips from top-1."""
    keys = [key for key in texts[0] if all(key in means for means in texts)]
    pooled = {key: np.concatenate([np.asarray(means[key], dtype=np.float64) for means in texts])
              for key in keys}
    summary = summarized(metrics, pooled)
    if scores:
        return summary | tails(joined(scores))
    return summary | ({FLIPS: TOP1.summarize(1 - pooled[TOP1.name])} if TOP1.name in pooled else {})


def _add_speed(row: ModelResult, times: PeerTimes, facts: PeerFacts, tokens: int) -> None:
    row.peak_bytes = times.peak_bytes
    prefill: tuple[PrefillSpeed, ...] = ()
    decode: tuple[DecodeSpeed, ...] = ()
    if times.prefill_tok_s:
        tok_s = Spread.of(times.prefill_tok_s)
        row.metrics["prefill_tok_s"] = tok_s.interval
        prefill = (PrefillSpeed(tokens=tokens, tok_s=tok_s, first_token_s=Spread.of(times.first_token_s)),)
    if times.decode_tok_s:
        tok_s = Spread.of(times.decode_tok_s)
        row.metrics["decode_tok_s"] = tok_s.interval
        decode = (DecodeSpeed(batch=1, context=tokens, tok_s=tok_s),)
    weights = facts.weight_bytes
    memory = MemoryUse(weights=weights, peak=times.peak_bytes) if weights is not None else None
    row.speed = SpeedSweep(decode=decode, prefill=prefill, memory=memory, load_s=facts.load_s)

