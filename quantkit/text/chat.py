"""Chat templates: how a conversation is written for the model that answers.

A template comes with the model, so from a stranger. It is found in the model's files only, never in
a request, and rendered by :mod:`quantkit.text.rendering` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.support.errors import SourceError
from quantkit.text import rendering

MAX_TEMPLATE = 128 * 2**10
"""Characters; the longest templates of real models have about 20,000."""
FILE = "chat_template.jinja"


class TemplateError(SourceError):
    """The model's chat template is malformed, or refused or failed a conversation."""


class ChatTemplate:
    """One template.

    Attributes:
        source: the text of the template.

    Raises:
        TemplateError: too large, or not a template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(f"the chat template has {len(source)} characters",
                                why=f"{MAX_TEMPLATE} are allowed", next="leave out --chat")
        self.source = source
        outcome = rendering.ask("quantkit.text.rendering:compiles", {"source": source})
        if outcome:
            raise TemplateError("the chat template is malformed", why=next(iter(outcome.values())),
                                next="leave out --chat, or get the model's files again")

    @classmethod
    def find(cls, files: Mapping[str, bytes], settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The model's template: ``chat_template.jinja``, else the one in ``tokenizer_config.json``.

        Args:
            files: side files by name.
            settings: the content of ``tokenizer_config.json``; of a list of named templates the one
                called ``default`` is taken, or the only one.

        Raises:
            TemplateError: it is there and can't be used.
        """
        if FILE in files:
            return cls(files[FILE].decode("utf-8", "replace"))
        template = settings.get("chat_template")
        if isinstance(template, list):
            named = {t["name"]: t["template"] for t in template
                     if isinstance(t, dict) and isinstance(t.get("name"), str) and "template" in t}
            template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
            if template is None:
                raise TemplateError("the model has no default chat template",
                                    why=f"named ones: {', '.join(map(str, named)) or 'none'}",
                                    next="name one of them 'default' in tokenizer_config.json")
        return cls(template) if isinstance(template, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, options: Mapping[str, Any] | None = None,
               **tokens: str) -> str:
        """The conversation as text, up to where the assistant answers.

        Args:
            messages: ``role`` and ``content`` each, and what else the template knows: ``tool_calls``,
                ``tool_call_id``, ``reasoning_content``.
            answer: whether an answer is to follow; without, the conversation is whole as it is.
            tools: functions that the model may call, as in OpenAI's requests.
            options: the template's own, such as ``enable_thinking``.
            tokens: tokens that the template may call by name: ``bos_token``, ``eos_token``, ….

        Raises:
            TemplateError: the template refuses the messages, fails, reaches for what it may not, or
                exceeds its time or size.
        """
        values = {"documents": None, **(options or {}), "messages": [dict(message) for message in messages],
                  "tools": [dict(tool) for tool in tools] if tools else None,
                  "add_generation_prompt": answer, **tokens}
        outcome = rendering.ask("quantkit.text.rendering:render", {"source": self.source, "values": values})
        if "refused" in outcome:
            raise TemplateError("the chat template refused the conversation", why=outcome["refused"],
                                next="check the messages' roles and order, or leave out --chat")
        if "text" not in outcome:
            raise TemplateError("the chat template failed", why=next(iter(outcome.values())),
                                next="leave out --chat")
        return outcome["text"]
