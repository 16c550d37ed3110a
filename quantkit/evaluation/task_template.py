"""Templates of task files, rendered in quantkit's own sandbox.

lm-eval renders them in a plain Jinja environment, where a template can run any code. Here they are
rendered beforehand, in a process of its own: lm-eval is only given their results.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from quantkit.support.errors import UsageError
from quantkit.text import rendering

MAX_LIST = 2**16
"""Characters of choices that a template writes; parsed, they take a hundred times as many bytes."""
_MODULE = "quantkit.evaluation.task_rendering"
_NO_LITERAL = (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)


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
        if outcome := rendering.ask(f"{_MODULE}:compiles", {"source": text}):
            raise UsageError(f"{where} is not a template", why=next(iter(outcome.values())),
                             next="correct the task file")

    def value(self, row: Mapping[str, Any], at: str) -> Any:
        """What it gives for a row; ``at`` names the row's file and line.

        Raises:
            UsageError: the row lacks a field, or the template fails or takes too long.
        """
        if self._text in row:
            return row[self._text]
        outcome = rendering.ask(f"{_MODULE}:render", {"source": self._text, "values": dict(row)})
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

