"""Chat templates: how a conversation is written for the model that answers.

A template comes with the model, so from a stranger. It is found in the model's files only, never in
a request, and rendered in :mod:`quantkit.text.sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from quantkit.errors import SourceError
from quantkit.text.sandbox import MeteredSandbox, Overrun

MAX_TEMPLATE = 128 * 2**10
"""Characters; the longest templates of real models have about 20,000."""
FILE = "chat_template.jinja"
_OURS = (jinja2.TemplateError, Overrun)
_PYTHONS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
            TypeError, ValueError)


class ChatTemplate:
    """One template.

    Args:
        source: its text.

    Raises:
        SourceError: too large, or not a template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise SourceError(f"the chat template has {len(source)} characters",
                              why=f"{MAX_TEMPLATE} are allowed", next="leave out --chat")
        try:
            self._code = MeteredSandbox().compile(source)
        except (*_OURS, *_PYTHONS, SyntaxError) as error:
            raise SourceError("the chat template is malformed", why=_reason(error),
                              next="leave out --chat, or get the model's files again") from None

    @classmethod
    def find(cls, files: Mapping[str, bytes], settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The model's template: ``chat_template.jinja``, else the one in ``tokenizer_config.json``.

        Args:
            files: side files by name.
            settings: the content of ``tokenizer_config.json``; of a list of named templates the one
                called ``default`` is taken, or the only one.

        Raises:
            SourceError: it is there and can't be used.
        """
        if FILE in files:
            return cls(files[FILE].decode("utf-8", "replace"))
        found = settings.get("chat_template")
        if isinstance(found, list):
            named = {t["name"]: t["template"] for t in found
                     if isinstance(t, dict) and isinstance(t.get("name"), str) and "template" in t}
            found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
            if found is None:
                raise SourceError("the model has no default chat template",
                                  why=f"named ones: {', '.join(map(str, named)) or 'none'}",
                                  next="name one of them 'default' in tokenizer_config.json")
        return cls(found) if isinstance(found, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool = True, **tokens: str) -> str:
        """The conversation as text, up to where the assistant answers.

        Args:
            messages: ``role`` and ``content`` each.
            answer: whether an answer is to follow; without, the conversation is whole as it is.
            tokens: what the template may call by name: ``bos_token``, ``eos_token``, ….

        Raises:
            SourceError: the template refuses the messages, fails, reaches for what it may not, or
                exceeds its time or size.
        """
        try:
            sandbox = MeteredSandbox()
            template = jinja2.Template.from_code(sandbox, self._code, sandbox.globals)
            return "".join(template.generate(messages=[dict(m) for m in messages], tools=None,
                                             documents=None, add_generation_prompt=answer, **tokens))
        except _OURS as error:
            raise SourceError("the chat template refused the conversation", why=_reason(error),
                              next="check the messages' roles and order, or leave out --chat") from None
        except _PYTHONS as error:
            raise SourceError("the chat template failed", why=f"{type(error).__name__}: {_reason(error)}",
                              next="leave out --chat") from None


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
