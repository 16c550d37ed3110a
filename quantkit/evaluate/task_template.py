"""Templates of task files, rendered in quantkit's own sandbox.

lm-eval renders them in a plain Jinja environment, where a template can run any code. Here they are
rendered beforehand: lm-eval is only given their results.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import jinja2

from quantkit.errors import UsageError
from quantkit.text.sandbox import MAX_OUTPUT, Meter, MeteredSandbox, Overrun

_ERRORS = (jinja2.TemplateError, Overrun, ArithmeticError, AssertionError, AttributeError, LookupError,
           MemoryError, RecursionError, TypeError, ValueError, SyntaxError, re.error)


class _Sandbox(MeteredSandbox):
    """With lm-eval's settings: whitespace stays, what isn't there is an error, ``regex_replace``."""

    def __init__(self) -> None:
        super().__init__()
        self.trim_blocks = self.lstrip_blocks = False
        self.keep_trailing_newline = True
        self.undefined = jinja2.StrictUndefined
        self.filters["regex_replace"] = self._regex_replace

    def _regex_replace(self, value: Any, pattern: str, repl: str, count: int = 0) -> str:
        text = str(value)
        if (len(text) + 1) * (len(str(repl)) + 1) > MAX_OUTPUT:
            raise Overrun("a replacement is too large")
        self.meter.spend(len(text))
        return re.sub(pattern, repl, text, count=count)


class TaskTemplate:
    """One value of a task file: a row's field if it is called so, else a template.

    Args:
        text: as in the file.
        where: names the file and the key, for messages.

    Raises:
        UsageError: it is not a template.
    """

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._sandbox = _Sandbox()
        try:
            code = self._sandbox.compile(text)
        except _ERRORS as error:
            raise UsageError(f"{where} is not a template", why=_reason(error)) from None
        self._template = jinja2.Template.from_code(self._sandbox, code, self._sandbox.globals)

    def value(self, row: Mapping[str, Any], at: str) -> Any:
        """What it gives for a row; ``at`` names the row's file and line.

        Raises:
            UsageError: the row lacks a field, or the template fails or takes too long.
        """
        if self._text in row:
            return row[self._text]
        self._sandbox.meter = Meter()
        try:
            return "".join(self._template.generate(**row))
        except _ERRORS as error:
            raise UsageError(f"{self._where} can't be filled in from {at}", why=_reason(error),
                             next=f"the row has: {', '.join(map(str, row)) or 'nothing'}") from None

    def items(self, row: Mapping[str, Any], at: str) -> list[Any] | None:
        """A list: the field itself, or the list that the rendered text spells; ``None`` if it isn't one."""
        found = self.value(row, at)
        if isinstance(found, str):
            try:
                found = ast.literal_eval(found.strip())  # literals only: nothing is run
            except _ERRORS:
                return None
        return list(found) if isinstance(found, list | tuple) else None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
