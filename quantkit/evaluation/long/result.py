"""The results of a comparison on long contexts: every reply, the buckets by position, and the protocol."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.evaluation.long.answer import When
from quantkit.evaluation.long.generated import Drift
from quantkit.evaluation.long.positions import PositionBucket
from quantkit.evaluation.metrics import finite
from quantkit.evaluation.paired import AnswerPair, PairedAnswers, of_answers

SOLVED = 0.75
"""A cell in which the full cache answers a smaller share says nothing about a setting."""
Cell = tuple[str, int, float | None, int]
"""Task, length, depth, hops: questions that are alike."""


@dataclass(frozen=True)
class LongProtocol:
    """Everything that changes a number.

    Attributes:
        text, text_sha256: what was read, and what things were hidden in unless ``filler``.
        filler: hay was generated.
        tasks, lengths, depths, samples, seed: see :func:`~quantkit.evaluation.long.items.make_items`.
        chat: asked by the model's chat template; else the user's text is continued.
        questions: the moments at which they came.
        prompt, new_tokens: of the texts that were read by position and generated.
        dtype: the dtype of activations.
        quantkit, torch, cpu, cores, threads, gpu: what it ran on.
    """

    text: str
    text_sha256: str
    filler: bool
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int
    samples: int
    seed: int
    chat: bool
    questions: tuple[When, ...]
    prompt: int
    new_tokens: int
    dtype: str
    quantkit: str
    torch: str
    cpu: str
    cores: int
    threads: int
    gpu: str | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides quality. Compare only numbers with equal fingerprints."""
        fields = asdict(self)
        for name in ("text", "quantkit", "torch", "cpu", "cores", "threads", "gpu"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """The protocol as lines for a report."""
        hay = "generated" if self.filler else "the text, generated for passkeys"
        gpu = f"{self.gpu}; " if self.gpu else ""
        form = "by the chat template" if self.chat else "as a text to continue"
        return [f"tasks {', '.join(self.tasks)}; text {self.text} (sha256 {self.text_sha256[:12]})",
                f"haystack: {hay}; depths: {self.depths}; samples: {self.samples}; seed {self.seed}; "
                f"questions {form}",
                f"by position and generated: prompts of {self.prompt} tokens, {self.new_tokens} generated",
                f"activations {self.dtype}; {gpu}{self.cpu}, "
                f"{self.cores} cores, {self.threads} threads, torch "
                f"{self.torch}, quantkit {self.quantkit}; fingerprint {self.fingerprint}"]


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer.

    Attributes:
        task, length, sample, depth, hops: which question.
        context, question: numbers of the context among all, and of the question in it.
        kv, when: the setting, and when the question came.
        right, logprob, text: see :class:`~quantkit.evaluation.long.answer.Answer`.
        expected, tokens: the right answer, and how many tokens it has.
    """

    task: str
    length: int
    sample: int
    depth: float | None
    hops: int
    context: int
    question: int
    kv: str
    when: When
    right: bool
    logprob: float
    text: str
    expected: str
    tokens: int

    @property
    def cell(self) -> Cell:
        """What it is counted with."""
        return self.task, self.length, self.depth, self.hops


@dataclass
class SettingVariant:
    """A KV setting, and when its questions came.

    Attributes:
        kv: the setting; the first of all is the full cache.
        when: ``None`` where nothing is ever dropped, or nothing was asked: it makes no difference.
        bytes_per_token: the bytes of codes and scales, all layers and heads.
        bytes: by length, of what the cache held at a prompt's end, at most.
        text_bytes: allocated when a text by position was all there.
    """

    kv: str
    when: When | None
    bytes_per_token: int
    bytes: dict[int, int] = field(default_factory=dict)
    text_bytes: int | None = None

    @property
    def label(self) -> str:
        """``int8``; ``snapkv(0.5), later``."""
        return self.kv if self.when is None else f"{self.kv}, {self.when}"


@dataclass
class LongResult:
    """A comparison of KV settings at length.

    Attributes:
        model, method: what ran.
        protocol: how the numbers were made.
        variants: the full cache first.
        replies: to every question, of every variant.
        buckets: by position, setting by setting.
        drifts: by generated length, one a setting.
    """

    model: str
    method: str
    protocol: LongProtocol
    variants: list[SettingVariant]
    replies: list[RecordedAnswer] = field(default_factory=list)
    buckets: list[PositionBucket] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """The tasks that ask questions, in order."""
        return list(dict.fromkeys(reply.task for reply in self.replies))

    def of(self, variant: SettingVariant, task: str) -> list[RecordedAnswer]:
        """A variant's replies, in the questions' order."""
        return [reply for reply in self.replies if reply.kv == variant.kv and reply.task == task
                and variant.when in (None, reply.when)]

    def solved(self) -> set[Cell]:
        """Cells of which the full cache answers at least :data:`SOLVED`: where settings can be compared."""
        cells: dict[Cell, list[bool]] = {}
        for task in self.tasks:
            for reply in self.of(self.variants[0], task):
                cells.setdefault(reply.cell, []).append(reply.right)
        return {cell for cell, right in cells.items() if sum(right) >= SOLVED * len(right)}

    def paired(self, variant: SettingVariant, task: str) -> PairedAnswers | None:
        """A variant against the full cache, over all questions: a choice of those that the full cache
        answers would be one against every setting. ``None`` if it solves no cell of the task."""
        if not any(reply.cell in self.solved() for reply in self.of(self.variants[0], task)):
            return None
        replies = zip(self.of(self.variants[0], task), self.of(variant, task), strict=True)
        return of_answers([AnswerPair(full.context, full.right, reply.right, reply.logprob - full.logprob)
                           for full, reply in replies])

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        solved = sorted(self.solved(), key=str)
        return {"model": self.model, "method": self.method,
                "protocol": asdict(self.protocol) | {"fingerprint": self.protocol.fingerprint},
                "settings": [asdict(variant) for variant in self.variants],
                "full_cache_solves": [dict(zip(("task", "length", "depth", "hops"), cell))
                                      for cell in solved],
                "against_full_cache": list(self._comparisons()),
                "replies": [asdict(reply) for reply in self.replies],
                "positions": [_bucket(bucket) for bucket in self.buckets],
                "generated": [{"kv": drift.kv, "decode_tok_s": drift.decode_tok_s,
                               "differs": list(drift.differs),
                               "buckets": [_bucket(part) for part in drift.buckets]}
                              for drift in self.drifts]}

    def _comparisons(self) -> Iterator[dict[str, Any]]:
        for task in self.tasks:
            for variant in self.variants[1:]:
                test = self.paired(variant, task)
                yield {"task": task, "kv": variant.kv, "question": variant.when,
                       **({} if test is None else asdict(test))}


def _bucket(bucket: PositionBucket) -> dict[str, Any]:
    return {"kv": bucket.kv, "low": bucket.low, "high": bucket.high,
            **{name: {end: finite(value) for end, value in asdict(interval).items()}
               for name, interval in bucket.values.items()},
            "kl_windows": [finite(value) for value in bucket.kl_windows]}
