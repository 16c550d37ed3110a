"""What a KV policy and a KV codec are. Neither knows the other: any policy works with any codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch

from quantkit.spec import Frozen

Phase = Literal["prefill", "prefill_end", "decode"]
"""``prefill_end`` is the prompt's last chunk."""
MOST = 2**31
"""No option counts more tokens."""
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and dtype of what is stored for one token of one head."""


@runtime_checkable
class KVCodec(Protocol):
    """How one token's key (or value) of one head is stored.

    Attributes:
        name: as registered.
    """

    name: str

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """What is stored for a vector ``[dim]`` that was computed in ``dtype``.

        Raises:
            UsageError: this head dimension doesn't fit the codec.
        """

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """``x [..., D]`` → the layout's tensors, ``[..., *shape]``. Finite in, finite out."""

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The layout's tensors → ``[..., D]``, in the dtype to compute attention in."""


@dataclass(frozen=True)
class Held:
    """What one layer holds of one sequence, as a policy sees it; slots are in order of position.

    Attributes:
        lengths: slots that each head holds, ``[Hkv]`` ints.
        seen: tokens that the sequence had so far.
        positions: → int32 ``[Hkv, S]``, original positions; −1 beyond a head's length.
        keys: → ``[Hkv, S, D]`` as the codec gives them back, already rotated.
        weights: → float32 ``[Hkv, G, w, S]``: attention of the last ``w`` queries (at most as many as
            the policy asked for) of the G query heads that share a key head.
    """

    lengths: tuple[int, ...]
    seen: int
    positions: Callable[[], torch.Tensor]
    keys: Callable[[], torch.Tensor]
    weights: Callable[[], torch.Tensor]


class KVPolicy(Frozen):
    """Which positions stay. A subclass adds its options as fields, the first called ``budget``.

    Attributes:
        on_prefill: acts after every chunk of the prompt, after its last, or never.
        every: acts every so many decode steps; ``None``: never.
        queries: how many of the last queries' attention weights it wants.
        visible: ``(window, sinks)`` if queries may look only at the first ``sinks`` positions and the
            last ``window``, also at those that still stand in a page; ``None``: at all that is held.
    """

    name: ClassVar[str]
    on_prefill: ClassVar[Literal["chunk", "end"] | None] = None
    keeps_all: ClassVar[bool] = False

    @property
    def every(self) -> int | None:
        return None

    @property
    def queries(self) -> int:
        return 0

    @property
    def visible(self) -> tuple[int, int] | None:
        return None

    def keep(self, held: Held) -> torch.Tensor | None:
        """The slots that stay, int64 ``[Hkv, n]`` in rising order, or ``None`` for all of them."""
        return None

    def acts(self, phase: Phase) -> bool:
        """Whether it acts at the end of such a step (in decode: at every ``every``-th)."""
        if phase == "decode":
            return self.every is not None
        return self.on_prefill == "chunk" or (self.on_prefill == "end" and phase == "prefill_end")
