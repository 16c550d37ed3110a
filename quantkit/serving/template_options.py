"""Further values for a model's chat template, given by a request: plain ones, without control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from quantkit.serving.errors import RefusedValue
from quantkit.serving.ignored import leave_out

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
        param: the parameter that says it.
        value: whether the model is to think, or how much: an :data:`Effort`.
        wish: whether the model may do otherwise without a word.
    """

    param: str
    value: bool | str
    wish: bool = False


def thinking_options(template: str, thinks: bool, hints: Iterable[ThinkingHint]) -> dict[str, Any]:
    """Values for a chat template that do what a request says of reasoning. What can't be done is left out.

    Args:
        template: its text, which shows the values that it knows.
        thinks: whether the model shows reasoning.
        hints: the first that says something counts.

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
        done = settings or ((off or hint.value is True) and thinks != off)
        if not done and not hint.wish:
            leave_out(hint.param, "the chat template has no such setting")
        options = {**settings, **options}
    return options


def _variables(template: str) -> set[str]:
    """Names in a template's code, except attributes (``message.thinking``) and words in its texts."""
    code = " ".join(re.findall(r"\{[%{](.*?)[%}]\}", template, re.DOTALL))
    return set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", _TEXT.sub("''", code)))


_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
