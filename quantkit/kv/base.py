"""The interfaces of KV policies and KV codecs. Neither knows the other: any policy works with any codec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field

from quantkit.support.frozen import Frozen

Phase = Literal["prefill", "prefill_part", "prefill_end", "decode", "reread"]
"""``prefill``: a whole chunk of the prompt. ``prefill_part``: less than a chunk; no policy acts after it.
``prefill_end``: the prompt's last tokens. ``reread``: the prompt is fed again, to score its positions."""
Tracked = Literal["attention_sum", "attention_max", "query_moments"]
"""What a policy can ask the cache to accumulate over all queries."""
MAX_TOKENS = 2**31
"""The largest number of tokens that an option takes."""
MAX_RESIDUAL = 2**30
"""The largest number of residual tokens: a length minus these and a page is still an int32."""
PAGE = 64
"""Slots (tokens) in a page. A page belongs to one KV head."""
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and dtype of what is stored."""


@runtime_checkable
class SideCodec(Protocol):
    """How the vectors of one side, keys or values, are stored.

    Attributes:
        name: identifies the bytes completely; kernels choose their code by it.
        hadamard: vectors are rotated before they are encoded (:func:`quantkit.ops.hadamard.apply_hadamard`).
            With keys, queries are rotated too; with values, the result of attention is rotated back.
    """

    name: str
    hadamard: bool

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """What is stored for one vector ``[dim]`` that was computed in ``dtype``.

        Raises:
            UsageError: the codec doesn't support this head dimension.
        """

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """What the 64 vectors of a page share. Empty unless they are encoded together."""

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode ``x [..., n, D]``. Where keys and values have codecs of one name, both may come in one call.

        Returns:
            The layout's tensors ``[..., n, *shape]``, and the shared ones ``[..., *shape]``, for which n is
            64. Finite input gives finite output.
        """

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of :meth:`encode`: ``[..., n, D]`` in a floating dtype; attention reads what a plugin's
        codec decodes as float32."""


class KVCodec(Frozen):
    """How keys and values are stored. A subclass adds its options as fields; the first is called ``bits``.

    Attributes:
        residual_length: at least this many of the newest tokens stay unencoded, in the model's dtype (KIVI's
            residual window). The others are encoded 64 at a time.
        sinks: this many of the first tokens stay unencoded too, rounded up to pages of 64.
    """

    name: ClassVar[str]
    residual_length: int = Field(default=0, ge=0, le=MAX_RESIDUAL)
    sinks: int = Field(default=0, ge=0, le=MAX_RESIDUAL)

    @abstractmethod
    def keys(self) -> SideCodec:
        """How keys are stored."""

    def values(self) -> SideCodec:
        """How values are stored. The default is: like keys."""
        return self.keys()


@dataclass(frozen=True)
class KVCodecs:
    """The codecs of a cache's keys and values, which may differ.

    Attributes:
        residual_length: the larger of the two codecs' lengths.
        first: slots at the beginning that are never encoded, whole pages; the larger of the two codecs'
            sinks.
    """

    keys: SideCodec
    values: SideCodec
    residual_length: int = 0
    first: int = 0

    def has_residual(self, dim: int, dtype: torch.dtype) -> bool:
        """Whether the newest vectors stay unencoded in pages of their own until 64 can be encoded."""
        shared = any(codec.shared(dim, dtype) for codec in (self.keys, self.values))
        return bool(self.residual_length or self.first or shared)

    def border(self, length: int) -> int:
        """Where a residual begins: of ``length`` slots those in ``[first, border)`` are read as codes."""
        return max(self.first, (length - self.residual_length) & -PAGE)


@dataclass(frozen=True)
class PolicyView:
    """What a policy sees of one sequence in one layer. Slots are in order of position.

    Attributes:
        layer, layers: index among the layers that this policy manages, and their number.
        lengths: slots that each head holds, ``[Hkv]`` ints.
        seen: tokens of the sequence so far, dropped ones included.
        prompt: tokens of its prompt.
        positions: → int32 ``[Hkv, S]``, original positions; −1 beyond a head's length.
        keys, values: → ``[Hkv, S, D]``, decoded by the codec; keys are rotated by their positions (RoPE).
        window_attention: → float32 ``[Hkv, S]``, attention weights of the last ``query_window`` queries,
            averaged over them and over the query heads that share a KV head; 0 beyond a head's length.
        attention_received: → float32 ``[Hkv, S]``, what the policy ``tracks``. ``attention_sum``: the
            attention that a slot received from all queries since it was stored, averaged over query heads.
            ``attention_max``: the largest attention that any query gave it.
        future_queries: ``(steps)`` → float32 mean ``[H, D]`` and covariance ``[H, D, D]`` of the next
            ``steps`` queries, scaled and rotated as keys are, assuming they are like those so far. For a
            policy that ``tracks`` ``query_moments``.
    """

    layer: int
    layers: int
    lengths: tuple[int, ...]
    seen: int
    prompt: int
    positions: Callable[[], torch.Tensor]
    keys: Callable[[], torch.Tensor]
    values: Callable[[], torch.Tensor]
    window_attention: Callable[[], torch.Tensor]
    attention_received: Callable[[], torch.Tensor]
    future_queries: Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class KVPolicy(Frozen):
    """Which positions stay. A subclass adds its options as fields; the first is called ``budget``.

    Most policies rank positions: those subclass
    :class:`~quantkit.kv.policies.score_policy.ScorePolicy` and implement ``score`` alone.

    Attributes:
        on_prefill: the policy acts on a prompt after every ``chunk``, at its ``end``, or never.
        tracks: the cache accumulates this over all queries for the policy.
        keeps_all: the policy never drops anything.
        uniform_budget: all heads of all layers keep the same number of slots.
        release_granularity: with a residual, slots outside of ``visible`` are released this many at a time.
        query_window: the number of last queries that the policy needs (SnapKV's observation window).
        reread_prompt: the prompt is fed again in chunks of this many tokens before the policy acts, and only
            those queries are tracked. ``None``: it isn't.
        decode_interval: the policy acts every this many decode steps. ``None``: never while decoding.
        slack: slots that a head may hold beyond its budget until the policy acts again; for a policy that
            won't, the first slots of an answer.
        visible: ``(window, sinks)`` if queries see only the first ``sinks`` positions and the last
            ``window``, even while others are still stored. ``None``: queries see all that is stored.
    """

    name: ClassVar[str]
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = None
    tracks: ClassVar[Tracked | None] = None
    keeps_all: ClassVar[bool] = False
    uniform_budget: ClassVar[bool] = True
    release_granularity: ClassVar[int] = PAGE

    @property
    def query_window(self) -> int:
        return 0

    @property
    def reread_prompt(self) -> int | None:
        return None

    @property
    def decode_interval(self) -> int | None:
        return None

    @property
    def slack(self) -> int:
        return self.decode_interval or PAGE

    @property
    def visible(self) -> tuple[int, int] | None:
        return None

    def keep(self, view: PolicyView) -> Sequence[torch.Tensor] | torch.Tensor | None:
        """Choose the slots that stay.

        How many stay may depend on the prompt's length and on ``view.lengths``, not on ``view.seen``: memory
        for an answer of any length is predicted from its first tokens.

        Returns:
            For each head int64 ``[n]`` in rising order, or ``None``: all of them stay.
        """
        return None

    def acts_after(self, phase: Phase) -> bool:
        """Whether the policy acts at the end of such a step (in decode: of every ``decode_interval``-th)."""
        if phase == "decode":
            return self.decode_interval is not None
        if phase in ("reread", "prefill_part"):
            return False
        return self.on_prefill == "chunk" or (self.on_prefill == "end" and phase == "prefill_end")

    def tracks_queries(self, phase: Phase) -> bool:
        """Whether the cache keeps the queries of such a step for this policy."""
        if phase == "reread" or self.reread_prompt:
            return phase == "reread"
        needs_queries = bool(self.query_window or self.tracks)
        return needs_queries and not (phase == "decode" and self.decode_interval is None)


OURS = "quantkit.kv.codecs."
"""Modules of the codecs that kernels read."""
KERNEL_NAMES = frozenset({"none", "bf16", "f16", "f32", "f32_hadamard", "int8", "fp8"} | {
    f"{kind}{bits}{mean}" for bits in (2, 3, 4)
    for kind, means in (("token", ("",)), ("channel", ("",)), ("hadamard", ("", "c"))) for mean in means})
"""Names by which a kernel chooses its code, so that no other codec may have them."""


def is_ours(codec: SideCodec) -> bool:
    """Whether a side's codec is a built-in one, which kernels read."""
    return type(codec).__module__.startswith(OURS)
