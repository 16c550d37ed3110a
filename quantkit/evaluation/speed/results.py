"""What one variant's speed and memory are, by batch and by context."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated

from pydantic import Field

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.speed.machine_load import MachineLoad
from quantkit.support.frozen import Frozen


class Spread(Frozen):
    """Median of timed runs, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=median(values), low=min(values), high=max(values))

    @property
    def interval(self) -> Interval:
        """The median with the range as its interval."""
        return Interval(self.median, self.low, self.high)

    @property
    def relative(self) -> float:
        """The range over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


class SweepSettings(Frozen):
    """What a sweep measures.

    Attributes:
        batches: sequences that decode side by side.
        contexts: tokens that each of them holds before.
        prefill: tokens of the prompt that goes through the engine.
        decode: tokens of an answer, and of a timed run of decoding.
        repeats: the number of timed runs.
        case_s: seconds after which a case of one batch and context begins no further run; a run takes half
            of it at most, but has a few tokens at least. Each result says how many runs and tokens it is of.
        context_s: a context that takes longer than this to read is left out.
    """

    batches: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 16)
    contexts: tuple[Annotated[int, Field(ge=0)], ...] = (0, 1024, 4096)
    prefill: int = Field(default=512, ge=1)
    decode: int = Field(default=32, ge=1)
    repeats: int = Field(default=3, ge=1)
    case_s: float = Field(default=3.0, gt=0)
    context_s: float = Field(default=30.0, gt=0)


class DecodeSpeed(Frozen):
    """Decoding with sequences side by side that each hold a context.

    Attributes:
        batch: the number of sequences.
        context: tokens that each holds before.
        tok_s: tokens a second of all sequences together; ``None`` if it wasn't measured.
        bytes_s: bytes of weights and KV cache that were read a second.
        read_bytes_s: read bandwidth of the machine, of all reads in the same run of measurements.
        of_read: the share of it that ``bytes_s`` is, both as medians.
        kv_bytes: the bytes of one sequence's pages at its context's end.
        runs: the number of timed runs; fewer than were asked for where one takes long.
        tokens: the tokens of each sequence in a timed run, at least; fewer where one takes long.
        left_out: why it wasn't measured.
    """

    batch: int
    context: int
    tok_s: Spread | None = None
    bytes_s: Spread | None = None
    read_bytes_s: Spread | None = None
    of_read: float | None = None
    kv_bytes: int | None = None
    runs: int | None = None
    tokens: int | None = None
    left_out: str | None = None

    def below(self, read_bytes_s: Spread | None) -> DecodeSpeed:
        """The same as a share of a read bandwidth; ``None``: it isn't known."""
        if self.bytes_s is None or read_bytes_s is None:
            return self
        return self.model_copy(update={"read_bytes_s": read_bytes_s,
                                       "of_read": self.bytes_s.median / read_bytes_s.median})


class PrefillSpeed(Frozen):
    """Reading a prompt from an empty cache.

    Attributes:
        tokens: the tokens of the prompt.
        tok_s: prompt tokens a second.
        first_token_s: seconds from the request to its first token, through the engine.
        decode_tok_s: tokens a second of the answer behind it, one sequence through the engine.
        runs: the number of timed runs.
        of_products: the share of the ceiling of arithmetic that its products are, attention aside.
    """

    tokens: int
    tok_s: Spread
    first_token_s: Spread | None = None
    decode_tok_s: Spread | None = None
    runs: int | None = None
    of_products: float | None = None


class MemoryUse(Frozen):
    """Bytes of memory.

    Attributes:
        weights: the bytes of weights as they lie in memory.
        workspace: buffers of the program beside weights and cache; ``None`` if that isn't known.
        steady: resident set at the end of an answer, the interpreter and torch included; on a GPU, with what
            was taken of its memory.
        peak: the largest of it from loading on, with one sequence. Decoding in batches comes after.
        kv_by_context: ``(tokens, bytes)`` of one sequence's cache at each context.
    """

    weights: int
    workspace: int | None = None
    steady: int | None = None
    peak: int | None = None
    kv_by_context: tuple[tuple[int, int], ...] = ()


class SpeedSweep(Frozen):
    """Everything about one variant's speed and memory.

    Attributes:
        decode: by batch and context.
        prefill: the speeds of reading, by prompt.
        gap_ms: milliseconds between two tokens of one answer, ``{"median": …, "p99": …}``.
        memory: the bytes that it took.
        load_s: seconds to open the model.
        kernels: phase → kernel → how many Linears it runs.
        read_bytes_s: read bandwidth of the machine in the same run.
        settings: the choice of measurements.
        load: the machine's load while requests were timed; ``None``: not known.
        withheld: why no speed is shown; ``None``: they are.
    """

    decode: tuple[DecodeSpeed, ...] = ()
    prefill: tuple[PrefillSpeed, ...] = ()
    gap_ms: dict[str, float] = Field(default_factory=dict)
    memory: MemoryUse | None = None
    load_s: float | None = None
    kernels: dict[str, dict[str, int]] = Field(default_factory=dict)
    read_bytes_s: float | None = None
    settings: SweepSettings | None = None
    load: MachineLoad | None = None
    withheld: str | None = None

    def without_speed(self, reason: str) -> SpeedSweep:
        """Memory and kernels alone, and why."""
        return self.model_copy(update={"decode": (), "prefill": (), "gap_ms": {}, "withheld": reason})
