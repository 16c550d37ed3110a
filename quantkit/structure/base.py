"""The interfaces of structured output: a constraint on tokens, and the parser of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quantkit.support.errors import QuantkitError


class ConstraintError(QuantkitError):
    """A constraint can't go on with its answer: it would take too much work, or it leaves no token."""


class TokenConstraint(Protocol):
    """Which tokens may come next in one sequence. Every sequence has its own."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Exclude what may not follow.

        Args:
            scores: float32 ``[vocab]``; not written to.

        Returns:
            float32 ``[vocab]``, −inf at excluded tokens; at least one is finite.

        Raises:
            ConstraintError: it can't be computed; only this sequence fails.
        """

    def accept(self, token: int) -> None:
        """Note the token that was chosen.

        Raises:
            ConstraintError: the token may not follow.
        """


@dataclass(frozen=True)
class TextDelta:
    """More of a turn's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what a model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a tool call.

    Attributes:
        index: number of the call in the turn.
        arguments: more of its arguments, which are JSON.
        id, name: the call's, with its first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


TurnDelta = TextDelta | ReasoningDelta | ToolCallDelta


class TurnParser(Protocol):
    """Splits one turn's text, as it comes, into what it means. How the text is cut makes no difference."""

    def push(self, text: str) -> list[TurnDelta]:
        """Add text; returns what is certain now."""

    def finish(self) -> list[TurnDelta]:
        """What was held back, now that nothing follows."""


class PlainTurn:
    """The parser of a turn that is nothing but text."""

    def push(self, text: str) -> list[TurnDelta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[TurnDelta]:
        return []
