"""Searches regular expressions of task files in a separate process, which a time limit ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.support import isolation
from quantkit.support.errors import UsageError
from quantkit.text.rendering import MEMORY

SECONDS = 10.0
"""For one answer."""
_MODULE = "quantkit.evaluation.task_rendering"


class BoundedPattern:
    """The part of a compiled pattern's interface that lm-eval's filter uses."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def findall(self, text: str) -> list[str | tuple[str, ...]]:
        """Every match, or its groups. Raises UsageError: it takes too long."""
        matches: list[Any] = _call("find_all", {"pattern": self._pattern, "text": text}, self._pattern)
        return [tuple(match) if isinstance(match, list) else match for match in matches]


def remove_all(patterns: Sequence[str], text: str) -> str:
    """``text`` without what each pattern matches. Raises UsageError: it takes too long."""
    if not patterns:
        return text
    cleaned: str = _call("remove_all", {"patterns": list(patterns), "text": text}, ", ".join(patterns))
    return cleaned


def regex_filter() -> Callable[..., Any]:
    """lm-eval's filter ``regex``, whose search is bounded; needs lm-eval."""
    return _filter()


@functools.cache
def _filter() -> Callable[..., Any]:
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
        return isolation.call(f"{_MODULE}:{function}", arguments, seconds=SECONDS, memory=MEMORY)
    except isolation.LimitError as error:
        raise UsageError(f"the expression {pattern[:200]!r} can't be searched for in an answer",
                         next="write it without nested repetitions, such as (a+)+",
                         why=f"it {error}") from None
    except isolation.RaisedError as error:
        raise UsageError(f"the expression {pattern[:200]!r} can't be used", why=str(error)[:200],
                         next="correct the task file") from None
