"""One comparison: load, score, time; the first model is the reference."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit import __version__
from quantkit.errors import UsageError
from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.protocol import Protocol, cpu_cores, cpu_name
from quantkit.evaluate.quality import compare, windows_of
from quantkit.evaluate.result import EvalResult, Row
from quantkit.evaluate.speed import measure
from quantkit.evaluate.text import BUILTIN, Text, load_text
from quantkit.plugins import current
from quantkit.progress import Event, Listener, silent
from quantkit.runtime.loader import LoadedModel, load


@dataclass(frozen=True)
class Settings:
    """What the caller chooses; see :class:`~quantkit.evaluate.protocol.Protocol` for the meaning."""

    text: str = BUILTIN
    window: int = 512
    windows: int = 40
    dtype: str = "auto"
    prefill: int = 256
    decode: int = 32
    repeats: int = 3
    speed: bool = True
    noise_floor: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("windows", 1), ("prefill", 1), ("decode", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}", why=f"it must be at least {least}")

    def revision_of(self, index: int) -> str | None:
        """``revision`` is the first model's."""
        return self.revision if index == 0 else None


def evaluate(uris: Sequence[str], settings: Settings, progress: Listener = silent) -> EvalResult:
    """Compare models.

    Args:
        uris: checkpoints or sources, the reference first.
        settings: protocol.
        progress: told of every window and every timed model.

    Raises:
        QuantkitError: a model can't be loaded, the text is unusable, or a measurement failed.
    """
    if not uris:
        raise UsageError("no model is given", next="quantkit eval smollm2")
    if len(set(uris)) != len(uris):
        raise UsageError("a model is given twice", next="name each model once")
    # models are loaded and dropped inside: while speed is measured, memory belongs to one worker
    result, tokens = _quality(uris, settings, load_text(settings.text), progress)
    if settings.speed:
        _speed(result, tokens.reshape(-1).tolist(), settings, progress)
    current().notify("on_run_finished", kind="eval", summary=result.to_dict())
    return result


def _quality(uris: Sequence[str], settings: Settings, text: Text,
             progress: Listener) -> tuple[EvalResult, torch.Tensor]:
    models = [load(uri, revision=settings.revision_of(i), dtype=settings.dtype)
              for i, uri in enumerate(uris)]
    tokens = _tokens(models, settings, text)
    extra = [load(uris[0], revision=settings.revision, dtype="float32")] if settings.noise_floor else []
    scores = compare([*models, *extra], tokens, progress)
    floor = scores.pop()["kl_mean"] if extra else None
    protocol = _protocol(models, settings, text, tokens)
    rows = [_row(model, score, protocol) for model, score in zip(models, scores)]
    return EvalResult(protocol, rows, floor), tokens


def _tokens(models: Sequence[LoadedModel], settings: Settings, text: Text) -> torch.Tensor:
    """int64 ``[windows, window]``, the same for all models."""
    for model in models:
        limit = model.config.max_position_embeddings
        if settings.speed and settings.prefill + settings.decode >= limit:
            raise UsageError(f"the speed test is longer than {model.uri} takes",
                             why=f"{settings.prefill} tokens in and {settings.decode} out; "
                                 f"it was made for {limit}", next="give a smaller --prefill, or --no-speed")
    tokens = windows_of(models[0], text.content, settings.window, settings.windows)
    for model in models[1:]:
        if not torch.equal(tokens, windows_of(model, text.content, settings.window, settings.windows)):
            raise UsageError(f"{model.uri} splits the text into other tokens than {models[0].uri}",
                             why="a comparison token by token needs the same tokenizer",
                             next="compare models of one family")
    return tokens


def _protocol(models: Sequence[LoadedModel], settings: Settings, text: Text,
              tokens: torch.Tensor) -> Protocol:
    dtypes = dict.fromkeys(str(model.dtype).removeprefix("torch.") for model in models)
    words = sum(len(models[0].tokenizer.decode(window, skip_special=False).split())
                for window in tokens.tolist())
    timed = (settings.prefill, settings.decode, settings.repeats) if settings.speed else (0, 0, 0)
    return Protocol(
        text.name, text.sha256, hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
        settings.window, settings.windows, words, ", ".join(dtypes), *timed, __version__, torch.__version__,
        cpu_name(), cpu_cores(), torch.get_num_threads())


def _row(model: LoadedModel, metrics: dict[str, Interval], protocol: Protocol) -> Row:
    digest = None if model.manifest is None else hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    if protocol.words and (tokens := metrics.get("perplexity")):
        metrics["word_perplexity"] = per_word(tokens, protocol.scored / protocol.words)
    return Row(model.uri, model.label, model.bits_per_weight, model.file_bytes, metrics=metrics,
               manifest_sha256=digest)


def per_word(perplexity: Interval, tokens_per_word: float) -> Interval:
    """Perplexity a word from that a token: comparable between tokenizers."""
    logs = (math.log(end) * tokens_per_word for end in (perplexity.value, perplexity.low, perplexity.high))
    return Interval(*(math.exp(log) if log < 700 else math.inf for log in logs))


def _speed(result: EvalResult, ids: list[int], settings: Settings, progress: Listener) -> None:
    prompt = (ids * -(-settings.prefill // len(ids)))[:settings.prefill]
    rows = result.rows
    for i, row in enumerate(rows):
        progress(Event(i, len(rows), f"speed of {row.method}"))
        speed = measure(row.model, prompt, decode=settings.decode, repeats=settings.repeats,
                        threads=result.protocol.threads, revision=settings.revision_of(i),
                        dtype=settings.dtype)
        row.peak_bytes, row.load_s, row.kernels = speed.peak_bytes, speed.load_s, speed.kernels
        row.metrics |= {"prefill_tok_s": speed.prefill_tok_s, "decode_tok_s": speed.decode_tok_s}
    progress(Event(len(rows), len(rows), "timed"))
