"""Combines weights and KV settings for an amount of memory, and sorts them by their expected loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.capacity.losses import losses
from quantkit.capacity.scratch import scratch_bytes
from quantkit.capacity.weights import WeightOption
from quantkit.kv.footprint import Footprint, footprint
from quantkit.kv.spec import KVSpec
from quantkit.runtime.engine import PREFILL_CHUNK
from quantkit.support.errors import UsageError

MOST_SEQUENCES = 1 << 20
"""More are not looked for."""


@dataclass(frozen=True)
class Requirements:
    """What has to fit.

    Attributes:
        context: tokens of a sequence, prompt and answer.
        concurrency: sequences at once.
        memory: bytes.
        prompt: tokens of a sequence that are its prompt; ``None``: half. It decides what policies drop.
    """

    context: int
    concurrency: int
    memory: int
    prompt: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context // 2) if self.prompt is None else min(self.prompt, self.context)


@dataclass(frozen=True)
class Combination:
    """One way to have the weights and one to have the cache, and all that they need.

    Attributes:
        weights, kv: which.
        footprint: the bytes that the cache takes for a sequence.
        requirements: the context, the sequences and the memory that it must fit.
        scratch: everything else by what it is for, bytes.
        weights_kl, kv_kl: measured on another model, nats a token; ``None``: never measured.
    """

    weights: WeightOption
    kv: KVSpec
    footprint: Footprint = field(repr=False)
    requirements: Requirements
    scratch: dict[str, int]
    weights_kl: float | None
    kv_kl: float | None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages of all sequences that are in use at the worst moment."""
        return self.footprint.used_bytes(self.requirements.concurrency)

    @property
    def spare_bytes(self) -> int:
        """The most bytes of pages that exist without being in use, and of those that are being moved."""
        count = self.requirements.concurrency
        return self.footprint.allocated_bytes(count) - self.kv_bytes + self.footprint.moving_bytes(count)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.weights.bytes + self.kv_bytes + self.spare_bytes + sum(self.scratch.values())

    @property
    def left(self) -> int:
        """Bytes of memory that nothing needs. If negative, that many bytes are missing."""
        return self.requirements.memory - self.total

    @property
    def kl(self) -> float | None:
        """Both together: what was measured of both at once is their sum, near enough (docs/plan.md)."""
        if self.weights_kl is None or self.kv_kl is None:
            return None
        return round(self.weights_kl + self.kv_kl, 8)

    @property
    def rank(self) -> tuple[Any, ...]:
        """The less, the better: measured before never measured, expected loss, bytes, names."""
        return (self.weights_kl is None, self.kv_kl is None, (self.weights_kl or 0.0) + (self.kv_kl or 0.0),
                self.total, self.weights.name, str(self.kv))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``: bytes, and what was measured."""
        return {"weights": self.weights.name, "kv": str(self.kv), "expected_kl": self.kl,
                "weights_kl": self.weights_kl, "kv_kl": self.kv_kl, "weight_bytes": self.weights.bytes,
                "weight_file_bytes": self.weights.file_bytes, "kv_bytes": self.kv_bytes,
                "kv_spare_bytes": self.spare_bytes, "other_bytes": self.scratch, "total_bytes": self.total,
                "left_bytes": self.left, "fits": self.left >= 0}

    def at(self, **changes: int) -> Combination:
        """The same for something else asked: ``context=…``, ``concurrency=…``."""
        requirements = dataclasses.replace(self.requirements, **changes)
        footprint = self.footprint
        if requirements.context != self.requirements.context:
            footprint = _footprint(self.weights, self.kv, requirements)
        scratch = scratch_bytes(self.weights, footprint, requirements.context, requirements.concurrency)
        return dataclasses.replace(self, footprint=footprint, requirements=requirements, scratch=scratch)

    def most_sequences(self) -> int:
        """How many sequences fit at this context; 0: none."""
        return _most(lambda count: self.at(concurrency=count).left >= 0, MOST_SEQUENCES)

    def most_context(self) -> int:
        """The longest context that fits for this number of sequences, up to the model's own; 0: none."""
        limit = self.weights.config.max_position_embeddings
        return _most(lambda tokens: self.at(context=tokens).left >= 0, limit)


def combine(pairs: Sequence[tuple[WeightOption, KVSpec]], requirements: Requirements) -> list[Combination]:
    """Every combination counted, the best first, fitting or not.

    Raises:
        UsageError: the context is longer than the model's, or a KV setting doesn't fit the model.
    """
    limit = pairs[0][0].config.max_position_embeddings
    if requirements.context > limit:
        raise UsageError(f"a context of {requirements.context:,} tokens is asked for",
                         why=f"the model was made for {limit:,}", next=f"--context {limit}")
    figures, footprints, combinations = losses(), dict[str, Footprint](), []
    for weights, kv in pairs:
        if (name := str(kv)) not in footprints:
            footprints[name] = _footprint(weights, kv, requirements)
        combinations.append(Combination(
            weights, kv, footprints[name], requirements,
            scratch_bytes(weights, footprints[name], requirements.context, requirements.concurrency),
            figures.of_weights(weights.name), figures.of_kv(name)))
    return sorted(combinations, key=lambda combination: combination.rank)


def front(combinations: Sequence[Combination]) -> list[Combination]:
    """The combinations, in order of :attr:`Combination.rank`, that need less than every better one."""
    kept: list[Combination] = []
    for combination in combinations:
        if not kept or combination.total < kept[-1].total:
            kept.append(combination)
    return kept


def _footprint(weights: WeightOption, kv: KVSpec, requirements: Requirements) -> Footprint:
    return footprint(weights.config, kv, weights.dtype, requirements.context, requirements.prompt_tokens,
                     PREFILL_CHUNK)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, where all smaller ones do."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
