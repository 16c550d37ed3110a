"""Runs one comparison on long contexts: loads once, and runs every setting, the full cache first."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.evaluation.feed import prefill
from quantkit.evaluation.long.answer import Answer, Answers, LongContextModel, When
from quantkit.evaluation.long.generated import by_step
from quantkit.evaluation.long.haystack import FillerHaystack, Haystack, TextHaystack
from quantkit.evaluation.long.items import LongItem, make_items
from quantkit.evaluation.long.journal import Journal
from quantkit.evaluation.long.positions import by_position, edges_of
from quantkit.evaluation.long.result import LongProtocol, LongResult, RecordedAnswer, SettingVariant
from quantkit.evaluation.long.tasks import TASKS
from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.evaluation.quality import windows_of
from quantkit.evaluation.text import BUILTIN, EvalText, load_text
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.plugins.manager import current
from quantkit.runtime.loader import LoadedModel, load
from quantkit.support.device import gpu_name
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.progress import Listener, ProgressEvent, silent

POSITIONS, GENERATED = "positions", "generated"
ALL = (*TASKS, POSITIONS, GENERATED)
"""Everything that can be measured."""


@dataclass(frozen=True)
class LongSettings:
    """What the caller chooses.

    Attributes:
        kv: settings to compare with the full cache, which always runs first; empty: the model's own.
        tasks: of :data:`ALL`.
        lengths: tokens, of prompts with questions and answers, and where buckets of positions end.
        depths: places that answers stand in, from the beginning to the end.
        samples: contexts a cell, texts by position, texts that are generated.
        text: what is read, and what things are hidden in.
        filler: hide them in generated sentences instead.
        chat: ask by the chat template.
        questions: when they come, see :data:`~quantkit.evaluation.long.answer.When`.
        prompt: tokens of a text that are its prompt, by position and generated.
        new_tokens: generated.
        seed: of everything that is drawn.
        dtype, device, revision: as for ``load``.
    """

    kv: tuple[KVSpec, ...] = ()
    tasks: tuple[str, ...] = ALL
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: int = 5
    samples: int = 2
    text: str = BUILTIN
    filler: bool = False
    chat: bool = False
    questions: tuple[When, ...] = ("known", "later")
    prompt: int = 512
    new_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        for name in ("depths", "samples", "prompt", "new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", why="it must be at least 1")
        for name, settings in (("task", self.tasks), ("length", self.lengths), ("KV setting", self.kv)):
            if len({str(setting) for setting in settings}) != len(settings):
                raise UsageError(f"a {name} is given twice", next=f"name each {name} once")
        if unknown := [task for task in self.tasks if task not in ALL]:
            raise UsageError(f"no task at length is called {unknown[0]!r}", why=did_you_mean(unknown[0], ALL))
        if not self.tasks or not self.lengths or min(self.lengths) < 1:
            raise UsageError("nothing is to be measured", why=f"tasks {self.tasks}, lengths {self.lengths}",
                             next="--tasks passkey --context 1024,2048")


def evaluate_long(uri: str, settings: LongSettings, progress: Listener = silent,
                  folder: Path | None = None) -> LongResult:
    """Compare KV settings with the full cache, at length.

    Args:
        uri: a checkpoint or source.
        settings: see there.
        progress: told of tokens that went through the model.
        folder: what is finished is kept there, and taken from there when the same is asked for again, until
            :func:`~quantkit.evaluation.long.journal.forget`.

    Raises:
        QuantkitError: the model can't be loaded, the text is unusable, a length doesn't fit, the model's
            output is not finite, or the folder has an unfinished comparison of something else.
    """
    text = load_text(settings.text)
    loaded = load(uri, revision=settings.revision, dtype=settings.dtype, device=settings.device)
    _check(loaded, settings)
    specs = [KVSpec(), *(kv for kv in settings.kv or (loaded.kv,) if kv != KVSpec())]
    items = _items(loaded, settings, text)
    windows = windows_of(loaded, text.content, max(settings.lengths), settings.samples,
                         ("--context", "--samples")) \
        if POSITIONS in settings.tasks else torch.empty(0, 0)
    prompts = windows_of(loaded, text.content, settings.prompt, settings.samples,
                         ("--prompt-tokens", "--samples")) \
        if GENERATED in settings.tasks else torch.empty(0, 0)
    edges = edges_of(settings.prompt, settings.lengths) if POSITIONS in settings.tasks else []
    each = sum(len(item.context) for item in items) + windows.numel() - len(windows)
    each += prompts.numel() + len(prompts) * settings.new_tokens
    fed = _Fed(progress, each * len(specs))
    readers = [LongContextModel(loaded, kv) for kv in specs]
    whens: Sequence[When | None] = settings.questions if items else (None,)
    result = LongResult(loaded.uri, loaded.label, _protocol(loaded, settings, text), [
        variant for reader in readers for variant in _variants(reader, whens)])
    key = _key(loaded, result.protocol, specs, (items, windows.tolist(), prompts.tolist()))
    with contextlib.closing(Journal(folder, key)) as journal:
        for number, item in enumerate(items):
            for reader in readers:
                result.replies += _ask(result, reader, item, number, settings.questions, journal,
                                       fed.to(f"{item.task} of {item.length} kv {reader.kv}"))
        if POSITIONS in settings.tasks:
            result.buckets, kv_bytes = by_position(loaded, specs, windows, settings.prompt, edges,
                                                   lambda count, kv: fed.to(f"positions kv {kv}")(count),
                                                   journal)
            for kv, count in zip(specs, kv_bytes):
                for variant in result.variants:
                    variant.text_bytes = count if variant.kv == str(kv) else variant.text_bytes
        if GENERATED in settings.tasks:
            result.drifts = by_step(loaded, specs, prompts, settings.new_tokens,
                                    lambda count, kv: fed.to(f"generated kv {kv}")(count), journal)
    current().notify("on_run_finished", kind="eval-long", summary=result.to_dict())
    return result


def _check(loaded: LoadedModel, settings: LongSettings) -> None:
    limit = loaded.config.max_position_embeddings
    if max(settings.lengths) > limit and set(settings.tasks) != {GENERATED}:
        raise UsageError(f"a length of {max(settings.lengths)} is longer than the model's context",
                         why=f"{loaded.uri} was made for {limit} tokens", next=f"--context {limit}")
    if GENERATED in settings.tasks and settings.prompt + settings.new_tokens > limit:
        raise UsageError(f"a prompt of {settings.prompt} and {settings.new_tokens} new tokens are too long",
                         why=f"{loaded.uri} was made for {limit} tokens",
                         next="give a smaller --prompt-tokens or --max-tokens")


def _items(loaded: LoadedModel, settings: LongSettings, text: EvalText) -> list[LongItem]:
    """Build all contexts before any model runs, so that one that doesn't fit is an error at once."""
    tasks = [task for task in settings.tasks if task in TASKS]
    if not tasks:
        return []
    hay: Haystack = FillerHaystack() if settings.filler else TextHaystack(text.name, text.content)
    return [item for task in tasks for length in sorted(settings.lengths)
            for item in make_items(loaded.tokenizer, task, hay, length=length, depths=settings.depths,
                                   samples=settings.samples, seed=settings.seed, chat=settings.chat)]


def _variants(reader: LongContextModel, questions: Sequence[When | None]) -> list[SettingVariant]:
    cache = KVCache(reader.loaded.config, reader.kv, reader.loaded.dtype, reader.loaded.model.device)
    return [SettingVariant(str(reader.kv), when, cache.bytes_per_token)
            for when in (questions if reader.policy_acts else (None,))]


def _key(loaded: LoadedModel, protocol: LongProtocol, specs: Sequence[KVSpec], fed: object) -> dict[str, Any]:
    """Everything that changes a number. Weights count by content: files may change under the same name."""
    cache = KVCache(loaded.config, KVSpec(), loaded.dtype, loaded.model.device)
    with torch.inference_mode():
        logits = prefill(loaded, cache, cache.add(), [min(id, loaded.config.vocab_size - 1)
                                                      for id in range(3, 300, 11)])
    says = hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()
    return {"model": [loaded.uri, loaded.label, says, repr(loaded.config), sorted(loaded.tokenizer.eos_ids)],
            "kv": [str(kv) for kv in specs], "protocol": asdict(protocol),
            "fed": hashlib.sha256(repr(fed).encode()).hexdigest()}


def _ask(result: LongResult, reader: LongContextModel, item: LongItem, number: int, questions: Sequence[When],
         journal: Journal, fed: Callable[[int], None]) -> list[RecordedAnswer]:
    """A setting's replies to all questions of a context; bytes go to its variants."""
    replies, name = [], f"context {number} kv {reader.kv}"
    if journal.has(name):
        fed(len(item.context))
    for record in journal.piece(name, lambda: [asdict(answers)
                                               for answers in reader.read(item, questions, fed)]):
        answers = Answers(record["when"], tuple(Answer(**answer) for answer in record["answers"]),
                          record["kv_bytes"])
        for variant in result.variants:
            if variant.kv == str(reader.kv) and variant.when in (None, answers.when):
                # the most that a prompt of this length needed: windows of codecs that wait differ a little
                variant.bytes[item.length] = max(variant.bytes.get(item.length, 0), answers.kv_bytes)
        for index, (question, answer) in enumerate(zip(item.questions, answers.answers, strict=True)):
            replies.append(RecordedAnswer(item.task, item.length, item.sample, question.depth, question.hops,
                                          number, index, str(reader.kv), answers.when, answer.right,
                                          answer.logprob, answer.text, question.text, len(question.answer)))
    return replies


def _protocol(loaded: LoadedModel, settings: LongSettings, text: EvalText) -> LongProtocol:
    return LongProtocol(
        text.name, text.sha256, settings.filler, settings.tasks, tuple(sorted(settings.lengths)),
        settings.depths, settings.samples, settings.seed, settings.chat, settings.questions, settings.prompt,
        settings.new_tokens, str(loaded.dtype).removeprefix("torch."), __version__, torch.__version__,
        cpu_name(), cpu_cores(), torch.get_num_threads(), gpu_name(loaded.model.device))


class _Fed:
    """Turns counts of tokens into progress events."""

    def __init__(self, progress: Listener, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def to(self, label: str) -> Callable[[int], None]:
        """A counter for what is worked on now."""
        self._progress(ProgressEvent(self._done, self._total, label))

        def count(tokens: int) -> None:
            self._done += tokens
            self._progress(ProgressEvent(self._done, self._total, label))

        return count
