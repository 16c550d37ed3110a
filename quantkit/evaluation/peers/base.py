"""What another tool must do to be a row: predict the same tokens of the same windows.

A :class:`Peer` is what the user wrote (``llama.cpp(FILE.gguf, bin=DIR)``); opening it gives a
:class:`PeerSession`, which predicts windows and is timed. What a tool can't tell is ``None`` and stays blank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from quantkit.support.frozen import Frozen
from quantkit.text.tokenizer import Tokenizer


class PeerFacts(Frozen):
    """What a tool says about itself and the model that it opened; ``None``: it doesn't say.

    Attributes:
        tool: with its version: ``llama.cpp b9821``.
        method: how its weights are kept: ``Q4_K - Medium``, ``bitsandbytes nf4``.
        vocab_size: tokens that it predicts.
        bits_per_weight: stored bits of all Linears, scales included, over their parameters.
        file_bytes: the bytes of all weights on disk.
        weight_bytes: the bytes of all weights in memory.
        load_s: seconds to open the model.
    """

    tool: str
    method: str
    vocab_size: int | None = None
    bits_per_weight: float | None = None
    file_bytes: int | None = None
    weight_bytes: int | None = None
    load_s: float | None = None


@dataclass(frozen=True)
class PeerPrediction:
    """What a tool predicts in a window, behind its prompt: T tokens.

    Attributes:
        logits: float32 ``[T, vocab]``; ``None``: it gives no more than the following.
        following: log-probability of each token that came, float32 ``[T]``; needed without ``logits``.
        likeliest: id of the token that it finds likeliest, int64 ``[T]``; ``None``: it doesn't say.
    """

    logits: torch.Tensor | None = None
    following: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None


class PeerTimes(Frozen):
    """What timed runs took, one number a run; empty: the tool can't be timed so.

    Attributes:
        prefill_tok_s: prompt tokens a second, until the first new token is there.
        decode_tok_s: tokens a second after that, one sequence at a time.
        first_token_s: seconds until the first new token.
        peak_bytes: largest resident set of the tool's process up to here.
    """

    prefill_tok_s: tuple[float, ...] = ()
    decode_tok_s: tuple[float, ...] = ()
    first_token_s: tuple[float, ...] = ()
    peak_bytes: int | None = None


class PeerSession(ABC):
    """A tool with an open model.

    Attributes:
        facts: everything that the tool says about itself.
    """

    facts: PeerFacts

    @abstractmethod
    def encode(self, text: str) -> list[int] | None:
        """The tool's own token ids of a text, without BOS; ``None``: it has no tokenizer to ask."""

    @abstractmethod
    def predict(self, ids: Sequence[int], prompt: int) -> PeerPrediction | None:
        """Predict every token of a window behind its first ``1 + prompt``.

        Args:
            ids: the window, at least ``2 + prompt`` tokens.
            prompt: predictions at its beginning that aren't wanted.

        Returns:
            ``len(ids) - 1 - prompt`` predictions; ``None``: the tool predicts no given tokens.

        Raises:
            QuantkitError: the tool failed.
        """

    @abstractmethod
    def time(self, prompts: Sequence[Sequence[int]], decode: int) -> PeerTimes:
        """Read each prompt and decode behind it; the first is a warm-up, whose times aren't returned.

        Args:
            prompts: token ids; no two begin alike, so that no prefix cache helps.
            decode: tokens to decode after the first new one.

        Raises:
            QuantkitError: the tool failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End what was started. May be called twice."""


class Peer(Frozen, ABC):
    """Another tool and its options, as they are written in a ``--peer``.

    Attributes:
        name: the name that it is called by.
        first: the option that may stand without its name.
    """

    name: ClassVar[str]
    first: ClassVar[str]

    @property
    @abstractmethod
    def uri(self) -> str:
        """The model, as a row names it."""

    @abstractmethod
    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> PeerSession:
        """Open the model.

        Args:
            context: tokens that it must take at once.
            threads: the threads that it computes with, if that isn't a server's own matter.
            tokenizer: the reference's tokenizer, for tools that take texts only.

        Raises:
            QuantkitError: the tool or the model isn't there, or refuses.
        """
