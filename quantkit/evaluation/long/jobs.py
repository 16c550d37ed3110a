"""The measurements of a comparison on long contexts, as jobs of a sweep."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from quantkit.evaluation.long.answer import Answers, LongContextModel, When
from quantkit.evaluation.long.generated import FollowedText, follow_text
from quantkit.evaluation.long.items import LongItem
from quantkit.evaluation.long.positions import WindowSums, score_window
from quantkit.evaluation.sweep.jobs import DECODE_SHARE, Job, JobRun
from quantkit.evaluation.sweep.models import ModelRef
from quantkit.evaluation.sweep.store import Data, MeasuredData, MeasurementResult
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.support.progress import ProgressEvent


class LongData(MeasuredData):
    """What each of these measurements says of the model: how its weights are kept."""

    label: str


@dataclass(frozen=True)
class LongJob(Job[Data]):
    """A model with KV settings at length.

    Attributes:
        model: the model that is measured.
        kv: its settings, as texts; where they are compared, the full cache is the first.
    """

    model: ModelRef
    kv: tuple[str, ...]

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens that go through the model with each setting."""

    @property
    def settings(self) -> list[KVSpec]:
        return [parse_kv(kv) for kv in self.kv]

    def key(self) -> dict[str, Any]:
        """Everything that its numbers depend on beside the model."""
        content = [getattr(self, item.name) for item in fields(self) if item.name != "model"]
        return {"kv": list(self.kv), "content": hashlib.sha256(repr(content).encode()).hexdigest()}

    def seconds(self, tok_s: float) -> float:
        return len(self.kv) * self.tokens / tok_s

    def listener(self, run: JobRun) -> Callable[[int], None]:
        """Hears how many tokens went through the model, and tells the run."""
        done = 0

        def fed(tokens: int) -> None:
            nonlocal done
            done += tokens
            run.progress(ProgressEvent(done, len(self.kv) * self.tokens, ""))

        return fed


class AnswersData(LongData):
    """A setting's answers to all questions about a context, by when these came."""

    moments: tuple[Answers, ...]


@dataclass(frozen=True)
class AnswersJob(LongJob[AnswersData]):
    """The questions about one context, answered with one setting.

    Attributes:
        item: the context and its questions.
        questions: the moments at which they come.
    """

    data = AnswersData

    item: LongItem
    questions: tuple[When, ...]

    @property
    def tokens(self) -> int:
        return len(self.item.context)

    def measure(self, run: JobRun) -> MeasurementResult[AnswersData]:
        loaded = run.load(self.model)
        reader = LongContextModel(loaded, *self.settings)
        moments = reader.read(self.item, self.questions, self.listener(run))
        return MeasurementResult(AnswersData(label=loaded.label, moments=tuple(moments)))


class WindowData(LongData):
    """A window scored by position, setting by setting."""

    window: WindowSums


@dataclass(frozen=True)
class WindowJob(LongJob[WindowData]):
    """A window through every setting, side by side.

    Attributes:
        ids: the tokens of the window.
        prompt: tokens that aren't scored.
        edges: the positions at which buckets begin and end.
    """

    data = WindowData

    ids: tuple[int, ...]
    prompt: int
    edges: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1

    def measure(self, run: JobRun) -> MeasurementResult[WindowData]:
        loaded = run.load(self.model)
        window = score_window(loaded, self.settings, self.ids, self.prompt, self.edges, self.listener(run))
        return MeasurementResult(WindowData(label=loaded.label, window=window))


class TextData(LongData):
    """A text that the full cache generated, as each setting follows it."""

    texts: tuple[FollowedText, ...]


@dataclass(frozen=True)
class TextJob(LongJob[TextData]):
    """A prompt that the full cache continues; every other setting is fed the same text.

    Attributes:
        ids: the tokens of the prompt.
        new_tokens: the number of tokens that are generated.
    """

    data, timed = TextData, True

    ids: tuple[int, ...]
    new_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.ids) + self.new_tokens

    def seconds(self, tok_s: float) -> float:
        """By the number of tokens; new ones go through the model one at a time."""
        return len(self.kv) * (len(self.ids) + self.new_tokens / DECODE_SHARE) / tok_s

    def measure(self, run: JobRun) -> MeasurementResult[TextData]:
        loaded = run.load(self.model)
        texts = follow_text(loaded, self.settings, self.ids, self.new_tokens, self.listener(run))
        return MeasurementResult(TextData(label=loaded.label, texts=tuple(texts)))
