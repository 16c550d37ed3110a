"""The interface of drafters: what guesses the next tokens of a text, for the model to confirm.

A draft never changes what is generated. The model computes the distribution of every drafted token's place in
one step, the sampler chooses from it as it would without drafts, and a draft is kept as long as it agrees
(https://arxiv.org/abs/2211.17192). A drafter therefore decides about speed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from quantkit.plugins.manager import describe_entry, registry
from quantkit.runtime.memory.kv import NO_DRAFTS
from quantkit.support.call_text import made_with, named_options, read_call
from quantkit.support.errors import PluginError
from quantkit.support.frozen import Frozen

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.runtime.loader import LoadedModel

_NEXT = 'quantkit generate MODEL PROMPT --draft "ngram(12)"'
MAX_DRAFT = 32
"""Tokens of a draft, at most."""


@dataclass
class DraftedText:
    """A text that is being generated, as a drafter sees it.

    Attributes:
        tokens: ids of prompt and answer so far, which grow at their end; the last one isn't in the cache yet.
        cache, sequence: where the model keeps the keys and values of all tokens but the last; another
            sequence after the text had to give up its pages.
        choose: ``(logits [vocab])`` → the token that the text's sampler would choose next, and then the one
            after it, with the random numbers that it will use there. Begins anew at each draft.
        state: whatever the drafter keeps for this text.
    """

    tokens: Sequence[int]
    cache: KVCache
    sequence: int
    choose: Callable[[torch.Tensor], int]
    state: object = None


class DraftSource(ABC):
    """Drafts for the texts of one engine. All calls come from its thread.

    Attributes:
        nbytes: bytes of memory that it takes beside the model.
        memory: what else it takes.
        cache: a KV cache of its own, if it has one.
        cold: whether the last proposal did more than others do, such as reading a prompt, so that its time
            doesn't say what drafts cost.
        layers: the model's layers whose inputs :meth:`observe` gets; the number of layers stands for what
            the last one leaves.
    """

    nbytes = 0
    memory = NO_DRAFTS
    cache: KVCache | None = None
    cold = False
    layers: tuple[int, ...] = ()

    def begin(self, text: DraftedText) -> None:
        """A text begins to be generated. By default nothing is kept for it."""
        text.state = None

    def observe(self, text: DraftedText, start: int, hidden: torch.Tensor) -> None:
        """Tokens of a text went through the model: of its prompt, of a draft that is yet to be checked, or
        anew after it had to give up its pages. Only for sources with :attr:`layers`.

        Args:
            text: the text that they belong to.
            start: position of the first one.
            hidden: float32 ``[n, layers, hidden]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has layers, and no observe()")

    @abstractmethod
    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        """Guess how texts go on.

        Args:
            limits: tokens of each draft, at most; none is 0.

        Returns:
            Token ids, a list for each text; fewer than its limit where more wouldn't be worth it.
        """

    def end(self, text: DraftedText) -> None:
        """A text was finished: let go of what was kept for it."""
        text.state = None


class Drafter(Frozen, ABC):
    """A way to draft. A subclass adds its options as fields.

    Attributes:
        first: the name of the option that may be given without its name.
        max_tokens: the largest number of tokens of a draft.
    """

    name: ClassVar[str]
    first: ClassVar[str] = "max_tokens"
    max_tokens: int = Field(default=8, ge=1, le=MAX_DRAFT)

    @abstractmethod
    def start(self, target: LoadedModel) -> DraftSource:
        """Make ready what drafts for this model.

        Raises:
            UsageError: it can't draft for this model.
        """


def parse_drafter(text: str) -> Drafter | None:
    """Read ``ngram``, ``ngram(16)`` or ``model(FOLDER, max_tokens=6)`` as a drafter with its options.
    ``none`` gives ``None``.

    Raises:
        UsageError: it can't be read, names a drafter that nobody registered, or an option is off.
    """
    name, written = read_call(text, _NEXT)
    if name == "none" and not written:
        return None
    kind: type[Drafter] = registry("drafters").get(name)
    if (called := getattr(kind, "name", None)) != name:
        raise PluginError(f"{describe_entry('drafters', name)} calls itself {called!r}",
                          why="a class has the name that it is registered by",
                          next=f'name: ClassVar[str] = "{name}" in {kind.__name__}')
    options = named_options(written, kind.first, text, _NEXT)
    return made_with(kind, options, f"drafter {name!r}", "docs/drafts.md", "see docs/drafts.md")
