"""Runs one comparison on long contexts: plans it, does what isn't there yet, and puts it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit import __version__
from quantkit.evaluation.long.answer import When
from quantkit.evaluation.long.generated import drifts_of
from quantkit.evaluation.long.haystack import FillerHaystack, Haystack, TextHaystack
from quantkit.evaluation.long.items import LongItem, make_items
from quantkit.evaluation.long.jobs import (
    AnswersData,
    AnswersJob,
    LongData,
    LongJob,
    TextData,
    TextJob,
    WindowData,
    WindowJob,
)
from quantkit.evaluation.long.positions import buckets_of, edges_of
from quantkit.evaluation.long.result import LongProtocol, LongResult, RecordedAnswer, SettingVariant
from quantkit.evaluation.long.tasks import TASKS
from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.evaluation.quality.score import windows_of
from quantkit.evaluation.sweep.jobs import Measurement, Place
from quantkit.evaluation.sweep.models import ModelFacts, facts_of
from quantkit.evaluation.sweep.plan import base_key, machine_key, with_needs
from quantkit.evaluation.sweep.run import SweepResults, measured
from quantkit.evaluation.text import BUILTIN, EvalText, load_text
from quantkit.formats.dtypes import FLOATS
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.plugins.manager import current
from quantkit.support.device import find_device, gpu_name
from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.progress import Listener, silent

POSITIONS, GENERATED = "positions", "generated"
ALL = (*TASKS, POSITIONS, GENERATED)
"""Everything that can be measured."""


@dataclass(frozen=True)
class LongSettings:
    """What the caller chooses.

    Attributes:
        kv: settings to compare with the full cache, which always runs first; empty: the model's own.
        tasks: some of :data:`ALL`.
        lengths: tokens of prompts with questions and answers, and where buckets of positions end.
        depths: places where answers stand, from the beginning to the end.
        samples: contexts a cell, texts by position, texts that are generated.
        text: the text that is read, and in which things are hidden.
        filler: whether they are hidden in generated sentences instead.
        chat: whether the chat template asks.
        questions: the moments at which they come, see :data:`~quantkit.evaluation.long.answer.When`.
        prompt: tokens of a text that are its prompt, by position and generated.
        new_tokens: tokens that are generated.
        seed: seed of everything that is drawn.
        dtype, device, revision: arguments of :func:`~quantkit.runtime.loader.load`.
        keep: whether what is measured is kept in the user's cache folder and used again.
        fresh: whether what was kept before is measured anew.
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
    keep: bool = False
    fresh: bool = False

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
                  loading: Listener = silent) -> LongResult:
    """Compare KV settings with the full cache, at length.

    Args:
        uri: a checkpoint or source.
        settings: the choice of measurements.
        progress: hears of every measurement, and of its parts.
        loading: hears of the model's weights.

    Raises:
        QuantkitError: the model can't be loaded, the text is unusable, a length doesn't fit, or the model's
            output is not finite. What was measured before is kept if the settings say so.
        Stopped: interrupted, likewise.
    """
    text = load_text(settings.text)
    model = facts_of(uri, settings.revision, settings.dtype, hashed=settings.keep)
    if model.config.diffusion is not None:
        raise UsageError(f"{uri} writes blocks, and isn't asked about long contexts",
                         why="answers are forced token by token there",
                         next=f"quantkit eval {uri}")
    _check(model, settings)
    specs = [KVSpec(), *(kv for kv in settings.kv or (model.kv,) if kv != KVSpec())]
    items = _items(model, settings, text)
    variants = _variants(model, specs, settings.questions if items else (None,))
    measurements = with_needs(_measurements(model, settings, specs, items, text), [model], settings.device)
    done = measured(measurements, model, keep=settings.keep, fresh=settings.fresh, device=settings.device,
                    progress=progress, loading=loading)
    results, first = SweepResults(measurements, done), done[0].data
    assert isinstance(first, LongData)
    result = LongResult(uri, first.label, _protocol(model, settings, text), variants)
    _add_answers(result, results, items, specs)
    _add_windows(result, results, settings, specs)
    if texts := results.of(GENERATED, TextData):
        result.drifts = drifts_of(list(map(str, specs)), settings.new_tokens,
                                  [text.data.texts for text in texts.values()])
    current().notify("on_run_finished", kind="eval-long", summary=result.to_dict())
    return result


def _check(model: ModelFacts, settings: LongSettings) -> None:
    limit = model.config.max_position_embeddings
    if max(settings.lengths) > limit and set(settings.tasks) != {GENERATED}:
        raise UsageError(f"a length of {max(settings.lengths)} is longer than the model's context",
                         why=f"{model.uri} was made for {limit} tokens", next=f"--context {limit}")
    if GENERATED in settings.tasks and settings.prompt + settings.new_tokens > limit:
        raise UsageError(f"a prompt of {settings.prompt} and {settings.new_tokens} new tokens are too long",
                         why=f"{model.uri} was made for {limit} tokens",
                         next="give a smaller --prompt-tokens or --max-tokens")


def _items(model: ModelFacts, settings: LongSettings, text: EvalText) -> list[LongItem]:
    """Build all contexts before any model runs, so that one that doesn't fit is an error at once."""
    tasks = [task for task in settings.tasks if task in TASKS]
    if not tasks:
        return []
    hay: Haystack = FillerHaystack() if settings.filler else TextHaystack(text.name, text.content)
    return [item for task in tasks for length in sorted(settings.lengths)
            for item in make_items(model.tokenizer, task, hay, length=length, depths=settings.depths,
                                   samples=settings.samples, seed=settings.seed, chat=settings.chat)]


def _variants(model: ModelFacts, specs: Sequence[KVSpec],
              questions: Sequence[When | None]) -> list[SettingVariant]:
    """Each setting; those that drop something once for each moment at which questions come."""
    variants = []
    for kv in specs:
        cache = KVCache(model.config, kv, FLOATS[model.dtype], torch.device("cpu"))
        moments = (None,) if cache.policy.keeps_all else questions
        variants += [SettingVariant(str(kv), when, cache.bytes_per_token) for when in moments]
    return variants


def _measurements(model: ModelFacts, settings: LongSettings, specs: Sequence[KVSpec],
                  items: Sequence[LongItem], text: EvalText) -> list[Measurement]:
    """Every context with every setting; windows and texts with all settings at once."""
    ref, base = model.ref(settings.dtype, settings.device), base_key(settings.dtype, settings.device)
    measurements = []

    def add(kind: str, label: str, job: LongJob[LongData], place: Place) -> None:
        # of a text that is generated, numbers depend on the machine too
        key = {**base, **(machine_key() if job.timed else {}), "kind": kind, "model": model.identity,
               **job.key()}
        measurements.append(Measurement(kind, label, job, key, place))

    for number, item in enumerate(items):
        for setting, kv in enumerate(map(str, specs)):
            add("answers", f"{item.task} of {item.length} kv {kv}",
                AnswersJob(ref, (kv,), item, settings.questions), Place(number, setting))
    every = tuple(map(str, specs))
    if POSITIONS in settings.tasks:
        windows = windows_of(model, text.content, max(settings.lengths), settings.samples,
                             ("--context", "--samples"))
        edges = tuple(edges_of(settings.prompt, settings.lengths))
        for number, ids in enumerate(windows.tolist()):
            add(POSITIONS, f"{POSITIONS} of text {number + 1}",
                WindowJob(ref, every, tuple(ids), settings.prompt, edges), Place(number))
    if GENERATED in settings.tasks:
        prompts = windows_of(model, text.content, settings.prompt, settings.samples,
                             ("--prompt-tokens", "--samples"))
        for number, ids in enumerate(prompts.tolist()):
            add(GENERATED, f"{GENERATED} text {number + 1}",
                TextJob(ref, every, tuple(ids), settings.new_tokens), Place(number))
    return measurements


def _add_answers(result: LongResult, results: SweepResults, items: Sequence[LongItem],
                 specs: Sequence[KVSpec]) -> None:
    """Every reply goes to the result, bytes to its variants."""
    for place, answered in results.of("answers", AnswersData).items():
        item, kv = items[place.model], str(specs[place.part])
        for moment in answered.data.moments:
            for variant in result.variants:
                if variant.kv == kv and variant.when in (None, moment.when):
                    # at most: how many vectors of a codec wait to be encoded differs a little
                    variant.bytes[item.length] = max(variant.bytes.get(item.length, 0), moment.kv_bytes)
            for index, (question, answer) in enumerate(zip(item.questions, moment.answers, strict=True)):
                result.replies.append(RecordedAnswer(
                    item.task, item.length, item.sample, question.depth, question.hops, place.model, index,
                    kv, moment.when, answer.right, answer.logprob, answer.text, question.text,
                    len(question.answer)))


def _add_windows(result: LongResult, results: SweepResults, settings: LongSettings,
                 specs: Sequence[KVSpec]) -> None:
    windows = [done.data.window for done in results.of(POSITIONS, WindowData).values()]
    if windows:
        edges = edges_of(settings.prompt, settings.lengths)
        for index, kv in enumerate(map(str, specs)):
            result.buckets += buckets_of(kv, edges, [window.means[index] for window in windows])
            for variant in result.variants:
                if variant.kv == kv:
                    variant.text_bytes = windows[-1].kv_bytes[index]


def _protocol(model: ModelFacts, settings: LongSettings, text: EvalText) -> LongProtocol:
    return LongProtocol(
        text.name, text.sha256, settings.filler, settings.tasks, tuple(sorted(settings.lengths)),
        settings.depths, settings.samples, settings.seed, settings.chat, settings.questions, settings.prompt,
        settings.new_tokens, model.dtype, __version__, torch.__version__,
        cpu_name(), cpu_cores(), torch.get_num_threads(), gpu_name(find_device(settings.device)))
