"""What one variant's speed and memory are, by batch and by context."""

from __future__ import annotations

from pydantic import Field

from quantkit.spec import Frozen


class Spread(Frozen):
    """Median of timed runs, and their range."""

    median: float
    low: float
    high: float


class DecodeSpeed(Frozen):
    """Decoding with sequences side by side that each hold a context.

    Attributes:
        batch: sequences.
        context: tokens that each holds before.
        tok_s: tokens a second of all sequences together; ``None`` if it wasn't measured.
        bytes_s: bytes of weights and KV cache that were read a second.
        of_read: that as a share of the bandwidth that was measured between the runs.
        kv_bytes: of one sequence's pages at its context's end.
        left_out: why it wasn't measured.
    """

    batch: int
    context: int
    tok_s: Spread | None = None
    bytes_s: Spread | None = None
    of_read: float | None = None
    kv_bytes: int | None = None
    left_out: str | None = None


class PrefillSpeed(Frozen):
    """Reading a prompt from an empty cache.

    Attributes:
        tokens: of the prompt.
        tok_s: prompt tokens a second.
        first_token_s: seconds from the request to its first token, through the engine.
    """

    tokens: int
    tok_s: Spread
    first_token_s: Spread | None = None


class MemoryUse(Frozen):
    """Bytes of memory.

    Attributes:
        weights: as they lie in memory.
        workspace: buffers of the program beside weights and cache; ``None`` if that isn't known.
        steady: resident set while it decodes, the interpreter and torch included.
        peak: largest resident set, from loading on.
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
        prefill: by prompt.
        gap_ms: milliseconds between two tokens of one answer, ``{"median": …, "p99": …}``.
        memory: bytes.
        load_s: seconds to open the model.
        kernels: phase → kernel → how many Linears it runs.
        read_bytes_s: read bandwidth of the machine in the same run.
    """

    decode: tuple[DecodeSpeed, ...] = ()
    prefill: tuple[PrefillSpeed, ...] = ()
    gap_ms: dict[str, float] = Field(default_factory=dict)
    memory: MemoryUse | None = None
    load_s: float | None = None
    kernels: dict[str, dict[str, int]] = Field(default_factory=dict)
    read_bytes_s: float | None = None
