"""What the caller of a comparison chooses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.evaluation.suite import EvalSuite, SuiteText
from quantkit.evaluation.text import BUILTIN
from quantkit.kv.spec import KVSpec
from quantkit.support.errors import UsageError


@dataclass(frozen=True)
class EvalSettings:
    """What is measured; see :class:`~quantkit.evaluation.protocol.Protocol` for the meaning.

    Attributes:
        text: a text as ``--text`` takes it.
        texts: several with names, instead of ``text``.
        prefill: ``None``: 256 tokens, or with KV settings as many as leave the window full at the end.
        batches, contexts: of decoding; no context: that of the prefill.
        noise_floor: whether every variant is compared with the reference's weights in float32 arithmetic.
        floor: whether the reference itself is: the noise floor.
        kv: every model runs with each of these; empty: with its own.
        prompt: ``None``: half the window, if any KV setting is other than ``none``.
        tasks: names of tasks, or of their files.
        task_data: the folder with the tasks' data.
        limit: items a task; ``None``: all.
        plot: keys of the metrics that a plot shows; empty: the usual ones.
        peers: other tools, as ``--peer`` takes them.
        roofline, sensitivity: whether operators, and the cost of 4 bits in each layer, are measured.
        suite: name of the suite that these come from.
        keep: whether what is measured is kept in the user's cache folder and used again.
        fresh: whether what was kept before is measured anew.
        needs_speed: a condition that needs speed to be measured; it is refused where that can't be.
    """

    text: str = BUILTIN
    texts: tuple[SuiteText, ...] = ()
    window: int = 512
    windows: int = 40
    dtype: str = "auto"
    prefill: int | None = None
    decode: int = 32
    repeats: int = 3
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    speed: bool = True
    noise_floor: bool = False
    floor: bool = False
    revision: str | None = None
    device: str = "auto"
    kv: tuple[KVSpec, ...] = ()
    prompt: int | None = None
    tasks: tuple[str, ...] = ()
    task_data: Path | None = None
    limit: int | None = None
    plot: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    roofline: bool = False
    sensitivity: bool = False
    suite: str | None = None
    keep: bool = False
    fresh: bool = False
    needs_speed: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("windows", 1), ("prefill", 1), ("decode", 1), ("repeats", 1),
                            ("prompt", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}", why=f"it must be at least {least}")
        if self.prompt is not None and self.prompt > self.window - 2:
            raise UsageError(f"a prompt of {self.prompt} tokens leaves nothing to predict",
                             why=f"a window has {self.window}", next="give a smaller --prompt-tokens")
        if len({str(spec) for spec in self.kv}) != len(self.kv):
            raise UsageError("a KV setting is given twice", next="name each setting once")

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the speed test."""
        if self.prefill is not None:
            return self.prefill
        return max(1, self.window - self.decode - 1) if self.kv else 256

    def revision_of(self, index: int) -> str | None:
        """``revision`` is the first model's."""
        return self.revision if index == 0 else None


def of_suite(suite: EvalSuite) -> EvalSettings:
    speed = suite.speed
    return EvalSettings(
        text=suite.text, texts=suite.texts, window=suite.window, windows=suite.windows,
        prompt=suite.prompt_tokens, floor=suite.floor, tasks=suite.tasks, limit=suite.limit,
        prefill=speed.prefill, decode=speed.max_tokens, repeats=speed.repeats, batches=speed.batches,
        contexts=speed.contexts, roofline=suite.roofline, sensitivity=suite.sensitivity, suite=suite.name)
