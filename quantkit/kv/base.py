"""What a KV policy and a KV codec are. Neither knows the other: any policy works with any codec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field, model_validator

from quantkit.spec import Frozen, accept_old_names

Phase = Literal["prefill", "prefill_part", "prefill_end", "decode", "reread"]
"""``prefill``: a whole chunk of the prompt; ``prefill_part``: less than a chunk, after which no policy acts;
``prefill_end``: the prompt's last tokens; ``reread``: the prompt comes again, to be looked at."""
MAX_TOKENS = 2**31
"""No option counts more tokens."""
MAX_RESIDUAL = 2**30
"""Nor more that wait: a length less these and a page is still an int32."""
PAGE = 64
"""Slots (tokens) in a page, each of one key head."""
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and dtype of what is stored."""


@runtime_checkable
class SideCodec(Protocol):
    """How the vectors of one side, keys or values, are stored.

    Attributes:
        name: says all that its bytes depend on; kernels know it by this.
        hadamard: vectors are rotated before (:func:`quantkit.ops.hadamard.apply_hadamard`), and with keys the
            queries that meet them; of values, attention's result is rotated back.
    """

    name: str
    hadamard: bool

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """What is stored for one vector ``[dim]`` that was computed in ``dtype``.

        Raises:
            UsageError: this head dimension doesn't fit.
        """

    def shared(self, dim: int, dtype: torch.dtype) -> Layout:
        """What the 64 vectors of a page share; nothing, unless they are encoded together."""

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """``x [..., n, D]`` → the layout's tensors ``[..., n, *shape]`` and the shared ones
        ``[..., *shape]``, for which n is 64. Finite in, finite out."""

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What :meth:`encode` made → ``[..., n, D]``, in the dtype to compute attention in."""


class KVOptions(Frozen):
    """Base of what policies and codecs take as options.

    Attributes:
        renamed: old name → the name that an option has now; settings may still say the old one.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, values: Any) -> Any:
        return accept_old_names(values, cls.renamed)


class KVCodec(KVOptions):
    """How keys and values are stored. A subclass adds its options as fields, the first called ``bits``.

    Attributes:
        residual_length: so many newest tokens, at least, stay as they were computed; others are encoded 64 at
            a time.
        sinks: so many first ones stay as they were computed too, rounded up to pages of 64.
    """

    name: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {"recent": "residual_length"}
    residual_length: int = Field(default=0, ge=0, le=MAX_RESIDUAL)
    sinks: int = Field(default=0, ge=0, le=MAX_RESIDUAL)

    @abstractmethod
    def keys(self) -> SideCodec:
        """How keys are stored."""

    def values(self) -> SideCodec:
        """How values are stored."""
        return self.keys()


@dataclass(frozen=True)
class KVCodecs:
    """Keys and values of a cache, which may have different codecs.

    Attributes:
        residual_length: the larger of what both ask for.
        first: slots that are never encoded, whole pages; the larger of what both ask for.
    """

    keys: SideCodec
    values: SideCodec
    residual_length: int = 0
    first: int = 0

    def has_residual(self, dim: int, dtype: torch.dtype) -> bool:
        """Whether the newest vectors wait as they are in pages of their own, until 64 are encoded."""
        shares = any(one.shared(dim, dtype) for one in (self.keys, self.values))
        return bool(self.residual_length or self.first or shares)

    def border(self, length: int) -> int:
        """Of so many slots those in ``[first, border)`` are read as codes, where others wait."""
        return max(self.first, (length - self.residual_length) & -PAGE)


@dataclass(frozen=True)
class PolicyView:
    """What one layer holds of one sequence, as a policy sees it; slots are in order of position.

    Attributes:
        layer, layers: index, and how many there are.
        lengths: slots that each head holds, ``[Hkv]`` ints.
        seen: tokens that the sequence had so far.
        prompt: those that it had at its prompt's end.
        positions: → int32 ``[Hkv, S]``, original positions; −1 beyond a head's length.
        keys, values: → ``[Hkv, S, D]`` as the codec gives them back, keys rotated by position.
        weights: → float32 ``[Hkv, S]``: attention of the last queries (as many as the policy asked for),
            mean over them and over the query heads that share a key head; 0 beyond a head's length.
        sums: → float32 ``[Hkv, S]``: attention of all queries since a slot is there, summed over them, mean
            over query heads; of ``peaks`` the largest attention that any query gave. Only for a policy that
            ``tracks`` it.
        future: ``(steps)`` → float32 mean ``[H, D]`` and covariance ``[H, D, D]`` of the next so many
            queries, scaled and rotated as keys are, if they are like those so far. Likewise.
    """

    layer: int
    layers: int
    lengths: tuple[int, ...]
    seen: int
    prompt: int
    positions: Callable[[], torch.Tensor]
    keys: Callable[[], torch.Tensor]
    values: Callable[[], torch.Tensor]
    weights: Callable[[], torch.Tensor]
    sums: Callable[[], torch.Tensor]
    future: Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class KVPolicy(KVOptions):
    """Which positions stay. A subclass adds its options as fields, the first called ``budget``.

    Attributes:
        on_prefill: acts after every chunk of the prompt, after its last, or never.
        tracks: what it wants to know of all queries: ``sums`` or ``peaks`` of their attention, or
            ``moments``, for :attr:`PolicyView.future`.
        reread_prompt: before it acts the prompt comes again, in pieces of so many tokens, and those queries
            are the ones that it watches.
        uniform_budget: all heads of all layers keep equally many.
        release_granularity: what queries don't see is given back by so many slots at once, where vectors
            wait.
        slack: slots that a head may hold beside its budget until the policy acts again; or, if it won't,
            the first of an answer.
        every: acts every so many decode steps; ``None``: never.
        queries: how many of the last queries' attention weights it wants.
        visible: ``(window, sinks)`` if queries may look only at the first ``sinks`` positions and the
            last ``window``, also at those that still stand in a page; ``None``: at all that is held.
    """

    name: ClassVar[str]
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = None
    tracks: ClassVar[Literal["sums", "peaks", "moments"] | None] = None
    keeps_all: ClassVar[bool] = False
    uniform_budget: ClassVar[bool] = True
    release_granularity: ClassVar[int] = PAGE

    @property
    def every(self) -> int | None:
        return None

    @property
    def slack(self) -> int:
        return self.every or PAGE

    @property
    def queries(self) -> int:
        return 0

    @property
    def reread_prompt(self) -> int | None:
        return None

    @property
    def visible(self) -> tuple[int, int] | None:
        return None

    def keep(self, held: PolicyView) -> Sequence[torch.Tensor] | torch.Tensor | None:
        """The slots that stay, of each head int64 ``[n]`` in rising order, or ``None`` for all of them.

        How many stay may depend on the prompt's length and on ``lengths``, not on ``seen``: what an answer of
        any length takes is predicted from its first tokens.
        """
        return None

    def acts(self, phase: Phase) -> bool:
        """Whether it acts at the end of such a step (in decode: at every ``every``-th)."""
        if phase == "decode":
            return self.every is not None
        if phase in ("reread", "prefill_part"):
            return False
        return self.on_prefill == "chunk" or (self.on_prefill == "end" and phase == "prefill_end")

    def listens(self, phase: Phase) -> bool:
        """Whether queries of such a step will be asked."""
        if phase == "reread" or self.reread_prompt:
            return phase == "reread"
        asks = bool(self.queries or self.tracks)
        return asks and not (phase == "decode" and self.every is None)
