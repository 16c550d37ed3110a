"""A conversation, its tools, and what is asked of its next turn, in no API's words.

Every API that chats reads its body into a :class:`Conversation`, and writes what
:class:`quantkit.serving.turns.NextTurn` makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from quantkit.runtime.sampler import Sampling
from quantkit.serving.errors import RefusedValue
from quantkit.serving.ignored import leave_out
from quantkit.serving.schema import INT64, Unicode, check_json
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool
from quantkit.support.errors import SourceError
from quantkit.support.strict_json import parse_object

MAX_OPTIONS = 16
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
OptionText = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9 _.,:/+-]*$")]
"""A text that can't hold a control token of any model."""
Effort = OptionText
"""How much a model is to think: none, minimal, low, medium, high, and what others have beside these."""
TemplateOptions = Annotated[dict[OptionName, OptionText | bool | int | float], Field(max_length=MAX_OPTIONS)]
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "answer", "self",
                      "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                      "mask_token", "chat_template"})
"""Names of a chat template's values that a request may not set."""


def check_options(options: dict[str, Any]) -> None:
    """Raises RefusedValue: an option that is the server's business."""
    if taken := sorted(options.keys() & RESERVED):
        raise RefusedValue("chat_template_kwargs", f"{taken[0]} can't be set by a request")


@dataclass(frozen=True)
class ThinkingHint:
    """What a request says of the model's reasoning.

    Attributes:
        param: The parameter that says it.
        value: Whether the model is to think, or how much: an :data:`Effort`.
        wish: Whether the model may do otherwise without a word.
    """

    param: str
    value: bool | str
    wish: bool = False


def thinking_options(template: str, shows_reasoning: bool, hints: Iterable[ThinkingHint]) -> dict[str, Any]:
    """Values for a chat template that do what a request says of reasoning. What can't be done is left out.

    Args:
        template: The text of the template, which shows the values that it knows.
        shows_reasoning: Whether the model shows reasoning.
        hints: The first of them that says something counts.

    Raises:
        ApiError: something can't be done, and the server is strict.
    """
    options: dict[str, Any] = {}
    variables = _variables(template)
    switches = [name for name in ("enable_thinking", "thinking") if name in variables][:1]
    for hint in hints:
        off = hint.value in (False, "none", "minimal")
        settings: dict[str, Any] = {}
        if isinstance(hint.value, str) and "reasoning_effort" in variables:
            settings["reasoning_effort"] = "low" if off else hint.value
        if off or hint.value is True:
            settings |= dict.fromkeys(switches, not off)
        done = settings or ((off or hint.value is True) and shows_reasoning != off)
        if not done and not hint.wish:
            leave_out(hint.param, "the chat template has no such setting")
        options = {**settings, **options}
    return options


def _variables(template: str) -> set[str]:
    """Names in a template's code, except attributes (``message.thinking``) and words in its texts."""
    code = " ".join(re.findall(r"\{[%{](.*?)[%}]\}", template, re.DOTALL))
    return set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", _TEXT.sub("''", code)))


_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


MAX_MESSAGES, MAX_TOOLS = 4096, 128
MAX_ARGUMENTS = 2**16
"""Characters of the arguments of one call in an earlier turn."""
TOOL_NAME = r"^[a-zA-Z0-9_-]{1,128}$"


def read_arguments(arguments: str) -> dict[str, Any]:
    """Arguments of a call in an earlier turn; none at all are an empty object.

    Raises:
        ValueError: they are no JSON object.
    """
    try:
        return check_json(parse_object((arguments or "{}").encode(), "the text", next="send a JSON object"))
    except SourceError as error:
        raise ValueError(f"the arguments of a tool call must be a JSON object: {error.what}") from None


def _arguments(arguments: str) -> str:
    read_arguments(arguments)
    return arguments


ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
Description = Annotated[str, Unicode]
"""Of a tool: as long as a body may be. The prompt that it becomes part of must fit the context."""
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS), Unicode, AfterValidator(_arguments)]
CallId = Annotated[str, Field(min_length=1, max_length=256), Unicode]


def choose_tools(tools: Sequence[Tool], choice: str | None, required: bool, structure: Structure | None,
                 param: str = "tool_choice") -> tuple[tuple[Tool, ...], Structure | None]:
    """Tools that the model is given, and what its turn must look like.

    Args:
        tools: The tools that the request gives.
        choice: This is ``none``, ``auto``, or with ``required`` the name of a tool, or ``None`` for any tool.
        required: Whether the turn must be a call.
        structure: The structure that is asked of an answer in text.
        param: The parameter that the choice comes from.

    Raises:
        RefusedValue: an unknown or doubled tool, or a choice without tools.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RefusedValue("tools", "two tools have the same name", "invalid_value")
    if required and not tools:
        raise RefusedValue(param, f"{param} asks for a tool call, and no tools are given", "invalid_value")
    if required and choice is not None and choice not in names:
        raise RefusedValue(param, f"{param} names {choice!r}, which is none of the tools", "invalid_value")
    if not required and (choice == "none" or not tools):
        return (), structure
    if required:  # the turn is calls, and what an answer would look like is for a later turn
        return tuple(tools), Structure(tools=tuple(tools), tool_choice=choice or "required")
    if structure is not None:
        return tuple(tools), replace(structure, tools=tuple(tools), tool_choice="auto")
    strict = any(tool.strict for tool in tools)
    return tuple(tools), Structure(tools=tuple(tools), tool_choice="auto") if strict else None


@dataclass(frozen=True)
class Conversation:
    """What is to be answered, and how.

    Attributes:
        messages: The messages as chat templates read them: ``role``, ``content``, and where they apply
            ``tool_calls`` (with their arguments as objects), ``tool_call_id``, ``name`` and
            ``reasoning_content``.
        sampling: The settings of the first choice; their ``max_tokens`` doesn't count.
        max_tokens: The tokens of an answer; ``None``: as many as fit.
        n: The number of answers.
        tools: The tools that the model may call.
        parallel_calls: Whether one turn may call more than one of them.
        structure: The structure that the answer must have.
        logprobs: The number of alternatives whose log-probabilities come with each token; ``None``: not even
            its own comes.
        template_options: Further values for the chat template.
        thinking: The hints about the model's reasoning.
        kv, priority: These are arguments of ``Engine.submit``.
        param, limit_param: The parameters that the messages and ``max_tokens`` come from.
        cache_salt: This keeps its prefixes apart; see :func:`~quantkit.serving.work.prefix_salt`.
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
