"""A conversation and what is asked of its next turn, in no API's words.

Every API that chats reads its body into a :class:`Conversation`, and writes what
:class:`quantkit.serving.turns.NextTurn` makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.runtime.sampler import Sampling
from quantkit.serving.schema import INT64
from quantkit.serving.template_options import ThinkingHint
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool

MAX_MESSAGES, MAX_TOOLS = 4096, 128
MAX_ARGUMENTS = 2**16
"""Characters of the arguments of one call in an earlier turn."""
TOOL_NAME = r"^[a-zA-Z0-9_-]{1,128}$"


@dataclass(frozen=True)
class Conversation:
    """What is to be answered, and how.

    Attributes:
        messages: as chat templates read them: ``role``, ``content``, and where they apply ``tool_calls``
            (with their arguments as objects), ``tool_call_id``, ``name`` and ``reasoning_content``.
        sampling: of the first choice; its ``max_tokens`` doesn't count.
        max_tokens: of an answer; ``None``: as many as fit.
        n: answers.
        tools: that the model may call.
        parallel_calls: whether one turn may call more than one of them.
        structure: what the answer must look like.
        logprobs: alternatives whose log-probabilities come with each token; ``None``: not even its own.
        template_options: further values for the chat template.
        thinking: what is said of the model's reasoning.
        kv, priority: how the KV cache is kept, and whose turn it is first; see ``Engine.submit``.
        param, limit_param: the parameters that the messages and ``max_tokens`` come from.
        cache_salt: keeps its prefixes apart; see :func:`~quantkit.serving.work.prefix_salt`.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    max_tokens: int | None
    n: int = 1
    tools: tuple[Tool, ...] = ()
    parallel_calls: bool = True
    structure: Structure | None = None
    logprobs: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    kv: str | None = None
    priority: int = 0
    param: str = "messages"
    limit_param: str = "max_tokens"
    thinking: tuple[ThinkingHint, ...] = ()
    cache_salt: str | None = None


def choice_sampling(sampling: Sampling, max_tokens: int, choice: int) -> Sampling:
    """The settings of choice number ``choice``: with a seed each has its own, which follows from it."""
    seed = None if sampling.seed is None else (sampling.seed + choice) % INT64
    return replace(sampling, max_tokens=max_tokens, seed=seed)


def called(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    """A call of an earlier turn as chat templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
