"""One comparison: load, score, time; the first model is the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit import __version__
from quantkit.errors import UsageError
from quantkit.evaluate.metrics import Interval
from quantkit.evaluate.protocol import Protocol, cpu_name
from quantkit.evaluate.quality import compare, windows_of
from quantkit.evaluate.speed import measure
from quantkit.evaluate.text import BUILTIN, load_text
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


@dataclass
class Row:
    """One model's results; a metric that wasn't measured is ``None``."""

    model: str
    method: str
    bits_per_weight: float
    file_bytes: int
    peak_bytes: int | None = None
    metrics: dict[str, Interval] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    manifest: str | None = None
    answer: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every metric as a number, and ``intervals`` beside them."""
        keys = ("perplexity", "kl_mean", "top1", "prefill_tok_s", "decode_tok_s")
        data: dict[str, Any] = {"model": self.model, "method": self.method,
                                "bits_per_weight": self.bits_per_weight, "file_bytes": self.file_bytes,
                                "peak_bytes": self.peak_bytes, **dict.fromkeys(keys)}
        data |= {name: found.value for name, found in self.metrics.items()}
        data["intervals"] = {name: [found.low, found.high] for name, found in self.metrics.items()}
        return data | {"kernels": self.kernels, "manifest_sha256": self.manifest, "answer": self.answer}


@dataclass
class EvalResult:
    """A comparison's rows and protocol; ``noise_floor`` is the KL of the reference in float32
    arithmetic against itself in its own: what a KL must exceed to mean anything."""

    protocol: Protocol
    rows: list[Row]
    noise_floor: Interval | None = None
    question: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        floor = self.noise_floor
        return {"results": [row.to_dict() for row in self.rows], "protocol": self.protocol.to_dict(),
                "noise_floor_kl": floor and {"value": floor.value, "interval": [floor.low, floor.high]},
                "question": self.question}


def evaluate(uris: Sequence[str], settings: Settings, progress: Listener = silent) -> EvalResult:
    """Compare models.

    Args:
        uris: checkpoints or sources, the reference first.
        settings: protocol.
        progress: told of every window and every timed model.

    Raises:
        QuantkitError: a model can't be loaded, the text is unusable, or a measurement failed.
    """
    if len(set(uris)) != len(uris):
        raise UsageError("a model is given twice", next="name each model once")
    text = load_text(settings.text)
    models = [load(uri, revision=settings.revision if i == 0 else None, dtype=settings.dtype)
              for i, uri in enumerate(uris)]
    tokens = windows_of(models[0], text.content, settings.window, settings.windows)
    for model in models[1:]:
        if not torch.equal(tokens, windows_of(model, text.content, settings.window, settings.windows)):
            raise UsageError(f"{model.uri} splits the text into other tokens than {uris[0]}",
                             why="a comparison token by token needs the same tokenizer",
                             next="compare models of one family")
    extra = [load(uris[0], revision=settings.revision, dtype="float32")] if settings.noise_floor else []
    scores = compare([*models, *extra], tokens, progress)
    floor = scores.pop()["kl_mean"] if extra else None
    rows = [_row(model, metrics) for model, metrics in zip(models, scores)]
    prompt = (tokens.reshape(-1).tolist() * -(-settings.prefill // tokens.numel()))[:settings.prefill]
    del models, extra
    for i, row in enumerate(rows if settings.speed else []):
        progress(Event(i, len(rows), f"speed of {row.method}"))
        speed = measure(row.model, prompt, decode=settings.decode, repeats=settings.repeats,
                        revision=settings.revision if i == 0 else None, dtype=settings.dtype)
        row.peak_bytes, row.kernels = speed.peak_bytes, speed.kernels
        row.metrics |= {"prefill_tok_s": speed.prefill_tok_s, "decode_tok_s": speed.decode_tok_s}
    protocol = Protocol(
        text.name, text.sha256, hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
        settings.window, settings.windows, settings.windows * (settings.window - 1), settings.dtype,
        settings.prefill, settings.decode, settings.repeats, __version__, torch.__version__, cpu_name(),
        torch.get_num_threads())
    result = EvalResult(protocol, rows, floor)
    current().notify("on_run_finished", kind="eval", summary=result.to_dict())
    return result


def _row(model: LoadedModel, metrics: dict[str, Interval]) -> Row:
    digest = None if model.manifest is None else hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    return Row(model.uri, model.label, model.bits_per_weight, model.file_bytes, None, metrics, {}, digest)
