"""Chat templates, rendered in jinja2's immutable sandbox under limits on time and size.

A template comes with the model, so from a stranger. It sees messages and a few plain functions,
nothing of Python.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantkit.errors import SourceError

MAX_TEMPLATE = 256 * 2**10
MAX_OUTPUT = 4 * 2**20
MAX_SECONDS = 2.0


class _Overrun(Exception):
    pass


class _Deadline:
    """Checked wherever a template can loop, which is where time goes."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise _Overrun(f"it took more than {MAX_SECONDS:g} s")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop, call and operator on the clock."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    deadline: _Deadline

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.deadline.check()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.deadline.check()
        if operator == "**" or (operator == "*" and not (_number(left) and _number(right))):
            raise _Overrun(f"it uses {operator!r} on {type(left).__name__}")
        if operator == "%" and isinstance(left, str):
            raise _Overrun("it formats by '%', which can ask for any width")
        return super().call_binop(context, operator, left, right)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


class ChatTemplate:
    """One template.

    Raises:
        SourceError: too large, or not a template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise SourceError(f"the chat template has {len(source)} characters", why=f"{MAX_TEMPLATE} are allowed")
        self._source = source
        try:
            self._environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise SourceError("the chat template is malformed", why=str(error)[:200]) from None

    @classmethod
    def find(cls, files: Mapping[str, bytes], settings: Mapping[str, Any]) -> ChatTemplate | None:
        """The model's template: ``chat_template.jinja``, else the tokenizer config's."""
        if "chat_template.jinja" in files:
            return cls(files["chat_template.jinja"].decode("utf-8", "replace"))
        found = settings.get("chat_template")
        if isinstance(found, list):
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = named.get("default", next(iter(named.values()), None))
        return cls(found) if isinstance(found, str) else None

    def render(self, messages: Sequence[Mapping[str, str]], **tokens: str) -> str:
        """The conversation as text, up to where the assistant answers.

        Raises:
            SourceError: the template refuses the messages, fails, reaches for what it may not, or
                exceeds its time or size.
        """
        environment = self._environment()
        pieces, size = [], 0
        try:
            template = environment.from_string(self._source)
            for piece in template.generate(messages=[dict(m) for m in messages],
                                           add_generation_prompt=True, **tokens):
                environment.deadline.check()
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise _Overrun(f"it wrote more than {MAX_OUTPUT} characters")
                pieces.append(piece)
        except (jinja2.TemplateError, _Overrun, TypeError, ValueError, AttributeError, KeyError,
                RecursionError, OverflowError, MemoryError) as error:
            raise SourceError("the chat template failed", why=str(error)[:300] or type(error).__name__,
                              next="check the messages' roles, or leave out --chat") from None
        return "".join(pieces)

    @staticmethod
    def _environment() -> _Environment:
        deadline = _Deadline()
        environment = _Environment(trim_blocks=True, lstrip_blocks=True,
                                   extensions=["jinja2.ext.loopcontrols"])
        environment.deadline = deadline

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(str(message))

        def bounded(*bounds: int) -> Any:
            numbers = range(*bounds)
            if len(numbers) > 10_000:
                raise _Overrun(f"range of {len(numbers)}")
            return _ticking(numbers, deadline)

        environment.globals.clear()
        environment.globals |= {"raise_exception": refuse, "range": bounded, "namespace": jinja2.utils.Namespace,
                                "strftime_now": lambda form: datetime.now().strftime(str(form)[:64])}
        for name in ("center", "indent", "format", "wordwrap", "filesizeformat", "pprint", "xmlattr", "random",
                     "batch", "slice"):  # take a width or a count, or are of no use to a conversation
            environment.filters.pop(name, None)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=min(int(indent), 8) if indent else None)
        return environment


def _ticking(numbers: range, deadline: _Deadline) -> Any:
    for number in numbers:
        deadline.check()
        yield number
