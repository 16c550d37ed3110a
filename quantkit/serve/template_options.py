"""Further values for a model's chat template, given by a request: plain ones, without control tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quantkit.serve.errors import RefusedValue

MAX_OPTIONS = 16
OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
OptionText = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9 _.,:/+-]*$")]
"""A text that can't hold a control token of any model."""
TemplateOptions = Annotated[dict[OptionName, OptionText | bool | int | float], Field(max_length=MAX_OPTIONS)]
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "answer", "self",
                      "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                      "mask_token", "chat_template"})
"""Names of a chat template's values that a request may not set."""


def check_options(options: dict[str, Any]) -> None:
    """Raises RefusedValue: an option that is the server's business."""
    if taken := sorted(options.keys() & RESERVED):
        raise RefusedValue("chat_template_kwargs", f"{taken[0]} can't be set by a request")
