"""What there is to measure: the product of models, KV settings and texts, as measurements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.evaluation.keys import PER_RUN
from quantkit.evaluation.metric_table import builtin_infos
from quantkit.evaluation.peers.run import PeerSpeedSettings, parse_peer
from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.evaluation.quality.blocks import CHOICE, KV_BYTES, SIDE_BY_SIDE, passes_of
from quantkit.evaluation.quality.score import windows_of
from quantkit.evaluation.quality.window_scores import LOGIT_BYTES, LOGITS
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.speed.results import SweepSettings
from quantkit.evaluation.sweep.jobs import (
    Measurement,
    PeerJob,
    PeerText,
    Place,
    RooflineJob,
    SensitivityJob,
    SpeedJob,
    TasksJob,
)
from quantkit.evaluation.sweep.models import ModelFacts, hash_of
from quantkit.evaluation.sweep.quality import Floor, QualityJob, metric_names
from quantkit.evaluation.text import EvalText, load_text
from quantkit.executor.base import TaskNeeds
from quantkit.formats.dtypes import FLOATS
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.modules import library
from quantkit.ops import cpu_machine
from quantkit.plugins.manager import current
from quantkit.runtime.kv_manager import check_blocks_in
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.support.device import find_device, gpu_name
from quantkit.support.errors import UsageError

SPARE = 4096
"""Letters of a text beyond those that its windows need."""
WEIGHT_BYTES, MEMORY_BESIDE = 2, 10 ** 9
"""Bytes of a parameter in 16 bits, and of a process beside its weights."""
WHOLE = 1 << 20
"""Letters of a text that is used as it is."""
LETTERS = 24
"""Letters of a token, at most on average."""


@dataclass(frozen=True)
class PlannedText:
    """A text and how many windows of it are used.

    Attributes:
        name: its name in reports; ``""``: it is the only one.
        text: the text's content.
        windows: the number of windows.
    """

    name: str
    text: EvalText
    windows: int


@dataclass(frozen=True)
class SweepPlan:
    """Everything that is to be measured.

    Attributes:
        models: all models, the reference first.
        kv: settings of each model, as texts; ``(None,)``: its own.
        texts: the texts that are scored.
        prompt: tokens of a window that go through the cache; ``None``: no cache is involved.
        measurements: all of them, in the order in which they are done.
    """

    models: tuple[ModelFacts, ...]
    kv: tuple[str | None, ...]
    texts: tuple[PlannedText, ...]
    prompt: int | None
    measurements: tuple[Measurement, ...]


def measurable(models: Sequence[ModelFacts], settings: EvalSettings,
               announce: Callable[[str], object] = lambda text: None) -> EvalSettings:
    """The settings without what can't be measured of these models, which ``announce`` is told. Raises
    UsageError: what can't be was asked for by name."""
    blocks = next((model for model in models if model.config.diffusion is not None), None)
    other = next((model for model in models if model.through_modules), blocks)
    if other is None:
        return settings
    kind = (f"{other.name} is a {other.config.model_type} model, which {library()} runs here"
            if other.through_modules else f"{other.name} writes blocks in as many steps as a text needs")
    timed = {key for key, info in builtin_infos().items() if info.per == PER_RUN}
    needs = settings.needs_speed or next((key for key in settings.plot if key in timed), None)
    if settings.speed and needs is not None:
        raise UsageError(f"{needs}: speed isn't measured of these models", why=kind, next="leave it out")
    if settings.peers:
        raise UsageError("--peer can't be used with this model", why=kind, next="leave it out")
    if not other.config.num_heads and (settings.kv or settings.prompt is not None):
        raise UsageError("--kv and --prompt-tokens can't be used with this model", why=(
            f"{kind}, and its layers keep something else than keys and values of one shape"),
            next="leave them out: quality is measured on whole windows")
    if settings.speed:
        announce(f"speed isn't measured: {kind}")
    return replace(settings, speed=False, roofline=False, sensitivity=False)


def planned_texts(settings: EvalSettings) -> tuple[PlannedText, ...]:
    """The texts, read. Raises UsageError: one isn't there or can't be used."""
    if not settings.texts:
        return (PlannedText("", load_text(settings.text), settings.windows),)
    return tuple(PlannedText(part.name, load_text(part.text), part.windows or settings.windows)
                 for part in settings.texts)


def make_plan(models: Sequence[ModelFacts], settings: EvalSettings,
              texts: Sequence[PlannedText]) -> SweepPlan:
    """Plan a comparison.

    Args:
        models: the reference first.
        settings: the choice of measurements.
        texts: the texts that are scored.

    Raises:
        UsageError: models can't be compared, a text is too short, or a test longer than a model's context.
    """
    kv = tuple(map(str, settings.kv)) or (None,)
    prompt = _prompt(models, settings)
    _check(models, settings)
    _check_texts(models, settings, texts)
    base = base_key(settings.dtype, settings.device)
    machine = machine_key()
    measurements = [*_quality(models, settings, texts, kv, prompt, base), *_tasks(models, settings, kv, base)]
    measurements += _peers(models[0], settings, texts, kv[0], prompt, base | machine)
    if settings.sensitivity and not models[0].quantized:
        first = models[0]
        measurements.append(Measurement("sensitivity", f"what 4 bits cost in each layer of {first.name}",
                            SensitivityJob(first.ref(settings.dtype, settings.device)),
                            {**base, "kind": "sensitivity", "model": first.identity,
                             "python": sys.version}, Place(0)))
    if settings.roofline:
        measurements += [Measurement("roofline", f"operators of {model.name}",
                                     RooflineJob(model.ref(settings.dtype, settings.device)),
                                     base | machine | {"kind": "roofline", "model": model.identity},
                                     Place(number)) for number, model in enumerate(models)]
    if settings.speed:
        ids = _prompt_ids(models[0], settings, texts)
        measurements += _speed(models, settings, kv, ids, base | machine)
    return SweepPlan(tuple(models), kv, tuple(texts), prompt, tuple(
        with_needs(measurements, models, settings.device)))


def base_key(dtype: str, device: str) -> dict[str, Any]:
    """What every number depends on."""
    return {"quantkit": __version__, "torch": torch.__version__, "dtype": dtype,
            "arithmetic": _arithmetic(device),
            "plugins": {plugin.distribution: plugin.version for plugin in current().plugins}}


def machine_key() -> dict[str, Any]:
    """What every speed depends on."""
    return {"cpu": cpu_name(), "cores": cpu_cores(), "threads": torch.get_num_threads()}


def with_needs(measurements: Sequence[Measurement], models: Sequence[ModelFacts],
               device: str) -> list[Measurement]:
    """Measurements with what each takes of a machine; without keys, if of a model nothing says which bytes
    it is."""
    gpus, weights = int(find_device(device).type == "cuda"), WEIGHT_BYTES * models[0].parameters
    known = all(model.identity for model in models)
    return [replace(measurement, key=measurement.key if known else None,
                    needs=TaskNeeds(gpus, MEMORY_BESIDE + weights * measurement.job.copies,
                                    measurement.job.timed)) for measurement in measurements]


def memory_bytes(models: Sequence[ModelFacts], settings: EvalSettings) -> int:
    """What a comparison takes of memory at most, about: one model after the other, and beside those that are
    scored the reference's head and some logits. Pages of a file aren't needed any more then."""
    reference, exact = models[0], settings.floor or settings.noise_floor
    head = reference.config.vocab_size * reference.config.hidden_size * WEIGHT_BYTES * (1 + 2 * exact)
    scoring = LOGIT_BYTES * min(LOGITS, settings.window * reference.config.vocab_size)
    decoded = reference.weight_bytes if reference.quantized else WEIGHT_BYTES * reference.parameters
    peaks = [decoded + scoring * (not reference.mapped), 2 * exact * WEIGHT_BYTES * reference.parameters]
    peaks += [model.weight_bytes + head + scoring for model in models[1:]]
    if (config := reference.config).diffusion is not None:  # windows side by side, in the KV cache
        token = 4 * config.num_layers * config.num_kv_heads * config.head_dim
        peaks = [peak + max(settings.window * token, min(KV_BYTES, SIDE_BY_SIDE * settings.window * token))
                 for peak in peaks]
    return RUNTIME_BYTES + max(peaks)


def disk_bytes(reference: ModelFacts, texts: Sequence[PlannedText], settings: EvalSettings) -> int:
    """What the reference leaves of all texts, in a file until the comparison ends."""
    tokens = settings.window * sum(text.windows for text in texts)
    return 4 * reference.config.hidden_size * tokens * (1 + (settings.floor or settings.noise_floor))


def _quality(models: Sequence[ModelFacts], settings: EvalSettings, texts: Sequence[PlannedText],
             kv: tuple[str | None, ...], prompt: int | None, base: Mapping[str, Any]) -> list[Measurement]:
    floor: Floor = "all" if settings.noise_floor else "reference" if settings.floor else "none"
    reference, measurements = models[0], []
    diffusion = reference.config.diffusion
    masks = {} if diffusion is None else {"masks": CHOICE}
    for number, model in enumerate(models):
        for place, text in enumerate(texts):
            job = QualityJob(reference.ref(settings.dtype, settings.device, decoded=True), kv[0],
                             model.ref(settings.dtype, settings.device, decoded=number == 0), kv,
                             _content(text, settings), settings.window, text.windows, prompt, floor,
                             1.0 if diffusion is None else passes_of(diffusion))
            key = {**base, "kind": "quality", "reference": reference.identity, "model": model.identity,
                   "kv": list(map(model.setting, kv)), "reference_kv": reference.setting(kv[0]),
                   "of_reference": job.of_reference, "text": text.text.sha256,
                   "window": settings.window, "windows": text.windows,
                   "prompt": prompt, "floor": floor if number == 0 or floor == "all" else "none",
                   "metrics": metric_names(), **masks}
            label = f"quality of {model.name}" + (f" on {text.name}" if text.name else "")
            measurements.append(Measurement("quality", label, job, key, Place(number, place)))
    return measurements


def _peers(reference: ModelFacts, settings: EvalSettings, texts: Sequence[PlannedText], kv: str | None,
           prompt: int | None, base: Mapping[str, Any]) -> list[Measurement]:
    speed = PeerSpeedSettings(prefill=settings.prefill_tokens, decode=settings.decode,
                              repeats=settings.repeats,
                              threads=torch.get_num_threads()) if settings.speed else None
    measurements = []
    for number, peer in enumerate(settings.peers):
        parts = tuple(PeerText(text.name or text.text.name, _content(text, settings), text.windows)
                      for text in texts)
        job = PeerJob(peer, reference.ref(settings.dtype, settings.device, decoded=True), kv, parts,
                      settings.window, prompt, speed)
        identity = hash_of(Path(parse_peer(peer).uri).expanduser())
        key = None if identity is None else {
            **base, "kind": "peer", "peer": peer, "identity": identity, "reference": reference.identity,
            "kv": reference.setting(kv), "metrics": metric_names(),
            "texts": [[text.name, text.text.name, text.text.sha256, text.windows] for text in texts],
            # what the tool's version is, only the tool knows: a run that was stopped today goes on
            "date": datetime.now(UTC).date().isoformat(), "window": settings.window,
            "prompt": prompt, "speed": speed and speed.model_dump(mode="json")}
        measurements.append(Measurement("peer", peer, job, key, Place(number)))
    return measurements


def _content(text: PlannedText, settings: EvalSettings) -> str:
    """As much of a text as its windows need."""
    return text.text.content[:max(WHOLE, settings.window * text.windows * LETTERS + SPARE)]


def _tasks(models: Sequence[ModelFacts], settings: EvalSettings, kv: tuple[str | None, ...],
           base: Mapping[str, Any]) -> list[Measurement]:
    if not settings.tasks:
        return []
    from quantkit.evaluation.tasks.run import check_tasks_of_blocks, prepare_tasks
    from quantkit.evaluation.tasks.scoring import DRAWN_TOKENS, DRAWS

    # before any model is loaded: what is missing shows at once
    ready = prepare_tasks(settings.tasks, data=settings.task_data, limit=settings.limit)
    check_tasks_of_blocks(models[0].config, models[0].name, ready)
    asked = [[task.file.model_dump(mode="json"), task.fingerprint] for task in ready]
    base = {**base, "lm_eval": version("lm_eval")}

    def measurement(kind: str, model: ModelFacts, setting: str | None, dtype: str, label: str,
                    place: Place) -> Measurement:
        job = TasksJob(model.ref(dtype, settings.device, decoded=place.model == 0), setting, settings.tasks,
                       settings.task_data, settings.limit)
        masks = {} if model.config.diffusion is None else {"masks": [CHOICE, DRAWS, DRAWN_TOKENS]}
        key = {**base, "dtype": dtype, "kind": "tasks", "model": model.identity, "asked": asked,
               "kv": model.setting(setting), **masks}
        return Measurement(kind, label, job, key, place)

    measurements = [measurement("tasks", model, setting, settings.dtype, _label("tasks for", model, setting),
                                Place(number, place))
                    for number, model in enumerate(models) for place, setting in enumerate(kv)]
    if (settings.floor or settings.noise_floor) and models[0].dtype != "float32":
        measurements.append(measurement("exact_tasks", models[0], kv[0], "float32",
                                        f"tasks for {models[0].name} in float32", Place(0)))
    return measurements


def _speed(models: Sequence[ModelFacts], settings: EvalSettings, kv: tuple[str | None, ...],
           ids: tuple[int, ...], base: Mapping[str, Any]) -> list[Measurement]:
    sweep = SweepSettings(batches=settings.batches, contexts=settings.contexts or (settings.prefill_tokens,),
                          prefill=settings.prefill_tokens, decode=settings.decode, repeats=settings.repeats)
    measurements = []
    for number, model in enumerate(models):
        for place, setting in enumerate(kv):
            job = SpeedJob(model.ref(settings.dtype, settings.device), setting, ids, sweep,
                           torch.get_num_threads())
            key = {**base, "kind": "speed", "model": model.identity,
                   "settings": sweep.model_dump(mode="json"), "kv": model.setting(setting)}
            measurements.append(Measurement("speed", _label("speed of", model, setting), job, key,
                                            Place(number, place)))
    return measurements


def _label(what: str, model: ModelFacts, setting: str | None) -> str:
    return f"{what} {model.name}" + (f" kv {setting}" if setting else "")


def _prompt(models: Sequence[ModelFacts], settings: EvalSettings) -> int | None:
    """``None`` if no cache is needed: nobody asks for a KV setting, no checkpoint has one of its own."""
    if not settings.kv and settings.prompt is None and all(model.kv == KVSpec() for model in models):
        return None
    if settings.window < 4:
        raise UsageError(f"--window {settings.window} is too short for a prompt and an answer",
                         next="--window 512")
    return settings.prompt or settings.window // 2


def _check(models: Sequence[ModelFacts], settings: EvalSettings) -> None:
    sizes = sorted({model.config.vocab_size for model in models})
    if len(sizes) > 1:
        raise UsageError(f"the models have vocabularies of {sizes} tokens",
                         why="KL and top-1 compare the same tokens", next="compare models of one family")
    if len({model.config.diffusion and model.config.diffusion.block_size for model in models}) > 1:
        raise UsageError("the models don't write alike", why=", ".join(
            f"{model.name}: " + ("a token after the other" if model.config.diffusion is None else
                                 f"blocks of {model.config.diffusion.block_size}") for model in models),
            next="compare models of one family")
    for model in models:
        context = model.config.max_position_embeddings
        if settings.window > context:
            raise UsageError(f"--window {settings.window} is longer than the context of {model.uri}",
                             why=f"it was made for {context} tokens")
        if settings.speed and settings.prefill_tokens + settings.decode >= context:
            raise UsageError(f"the speed test is longer than {model.uri} takes",
                             why=f"{settings.prefill_tokens} tokens in and {settings.decode} out; "
                                 f"it was made for {context}",
                             next="give a smaller --prefill, or --no-speed")


def _check_texts(models: Sequence[ModelFacts], settings: EvalSettings, texts: Sequence[PlannedText]) -> None:
    """That each text is long enough and all models split it alike, and that each takes the KV settings."""
    for text in texts:
        content = _content(text, settings)
        ids = windows_of(models[0], content, settings.window, text.windows)
        diffusion = models[0].config.diffusion
        if diffusion is not None and (ids == diffusion.mask_token).any():
            raise UsageError(f"the text {text.text.name} has the mask in it",
                             why="it stands for a token that isn't known yet", next="--text builtin:code")
        for model in models[1:]:
            if not torch.equal(ids, windows_of(model, content, settings.window, text.windows)):
                raise UsageError(f"{model.uri} splits the text into other tokens than {models[0].uri}",
                                 why="a comparison token by token needs the same tokenizer",
                                 next="compare models of one family")
    for spec in settings.kv:
        check_blocks_in(KVCache(models[0].config, spec, FLOATS[models[0].dtype], torch.device("cpu")))


def _prompt_ids(model: ModelFacts, settings: EvalSettings, texts: Sequence[PlannedText]) -> tuple[int, ...]:
    """Of the speed tests: the first text's beginning, again and again if it is too short."""
    length = settings.prefill_tokens
    ids = model.tokenizer.encode(texts[0].text.content[:length * LETTERS + SPARE], special=False)
    return tuple((ids * -(-length // max(1, len(ids))))[:length])


def _arithmetic(device: str) -> str:
    """What decides the bits of a number: the GPU, or the CPU's instructions."""
    if (gpu := gpu_name(find_device(device))) is not None:
        return gpu
    return "torch" if cpu_machine.reason_against_kernels() is not None else cpu_machine.isa().name
