"""What a task file may run: its templates and regular expressions, in a process with limits.

lm-eval renders templates in a plain Jinja environment, where they can run any code, and its regular
expressions may search forever. Here both go through quantkit's own sandbox in another process: lm-eval is
only given the results. :func:`compiles`, :func:`render`, :func:`find_matches` and :func:`delete_matches` run
there.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from quantkit.support import isolation
from quantkit.support.errors import UsageError
from quantkit.text import rendering
from quantkit.text.rendering import MEMORY, Outcome, compile_with, render_with
from quantkit.text.sandbox import MAX_OUTPUT, LimitExceeded, MeteredSandbox

MAX_LIST = 2**16
"""Characters of choices that a template writes; parsed, they take a hundred times as many bytes."""
SECONDS = 10.0
"""A search in one answer may take this long."""
_NO_LITERAL = (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)


class TaskTemplate:
    """One value of a task file: a row's field if it is called so, else a template.

    Args:
        text: the value in the file.
        where: names the file and the key, for messages.

    Raises:
        UsageError: it is not a template.
    """

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        if outcome := rendering.ask(f"{__name__}:compiles", {"source": text}):
            raise UsageError(f"{where} is not a template", why=next(iter(outcome.values())),
                             next="correct the task file")

    def value(self, row: Mapping[str, Any], at: str) -> Any:
        """What it gives for a row; ``at`` names the row's file and line.

        Raises:
            UsageError: the row lacks a field, or the template fails or takes too long.
        """
        if self._text in row:
            return row[self._text]
        outcome = rendering.ask(f"{__name__}:render", {"source": self._text, "values": dict(row)})
        if "text" not in outcome:
            raise UsageError(f"{self._where} can't be filled in from {at}", why=next(iter(outcome.values())),
                             next=f"the row has: {', '.join(map(str, row)) or 'nothing'}")
        return outcome["text"]

    def items(self, row: Mapping[str, Any], at: str) -> list[Any] | None:
        """A list: the field itself, or the list that the rendered text spells; ``None`` if it isn't one."""
        value = self.value(row, at)
        if isinstance(value, str):
            if len(value) > MAX_LIST:
                return None
            try:
                value = ast.literal_eval(value.strip())  # literals only: nothing is run
            except _NO_LITERAL:
                return None
        return list(value) if isinstance(value, list | tuple) else None


class BoundedPattern:
    """The part of a compiled pattern's interface that lm-eval's filter uses."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def findall(self, text: str) -> list[str | tuple[str, ...]]:
        """Every match, or its groups. Raises UsageError: it takes too long."""
        matches: list[Any] = _call("find_matches", {"pattern": self._pattern, "text": text}, self._pattern)
        return [tuple(match) if isinstance(match, list) else match for match in matches]


def remove_all(patterns: Sequence[str], text: str) -> str:
    """``text`` without what each pattern matches. Raises UsageError: it takes too long."""
    if not patterns:
        return text
    cleaned: str = _call("delete_matches", {"patterns": list(patterns), "text": text}, ", ".join(patterns))
    return cleaned


@functools.cache
def regex_filter() -> Callable[..., Any]:
    """lm-eval's filter ``regex``, whose search is bounded; needs lm-eval."""
    from lm_eval.filters.extraction import RegexFilter

    class BoundedRegexFilter(RegexFilter):
        """The same; a match that isn't there is an error of the task file."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.regex = BoundedPattern(self.regex_pattern)

        def apply(self, resps: Any, docs: Any) -> Any:
            try:
                return super().apply(resps, docs)
            except IndexError:
                raise UsageError(f"an answer has no match {self.group_select} of {self.regex_pattern!r}",
                                 why="group_select asks for more than there are",
                                 next="set group_select to 0, the first match, or -1, the last") from None

    return BoundedRegexFilter


def _call(function: str, arguments: dict[str, Any], pattern: str) -> Any:
    try:
        return isolation.call(f"{__name__}:{function}", arguments, seconds=SECONDS, memory=MEMORY)
    except isolation.LimitError as error:
        raise UsageError(f"the expression {pattern[:200]!r} can't be searched for in an answer",
                         next="write it without nested repetitions, such as (a+)+",
                         why=f"it {error}") from None
    except isolation.RaisedError as error:
        raise UsageError(f"the expression {pattern[:200]!r} can't be used", why=str(error)[:200],
                         next="correct the task file") from None


class _Sandbox(MeteredSandbox):
    """The sandbox with lm-eval's settings: whitespace stays, undefined names are errors."""

    def __init__(self) -> None:
        super().__init__()
        self.trim_blocks = self.lstrip_blocks = False
        self.keep_trailing_newline = True
        self.undefined = jinja2.StrictUndefined
        self.filters["regex_replace"] = self._regex_replace

    def _regex_replace(self, value: Any, pattern: str, repl: str, count: int = 0) -> str:
        text = str(value)
        if (len(text) + 1) * (len(str(repl)) + 1) > MAX_OUTPUT:
            raise LimitExceeded("a replacement is too large")
        self.meter.spend(len(text))
        return re.sub(pattern, repl, text, count=count)


def compiles(source: str) -> Outcome:
    """Whether it is a template: ``{}`` or ``malformed``."""
    return compile_with(_Sandbox, source)


def render(source: str, values: dict[str, Any]) -> Outcome:
    """A template's text for a row's fields."""
    return render_with(_Sandbox, source, values)


def find_matches(pattern: str, text: str) -> list[str | tuple[str, ...]]:
    return re.findall(pattern, text)


def delete_matches(patterns: list[str], text: str) -> str:
    """``text`` without what each pattern matches, one after another."""
    for pattern in patterns:
        text = re.sub(pattern, "", text)
    return text
