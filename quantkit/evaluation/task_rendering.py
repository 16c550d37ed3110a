"""Functions that run in a separate process: rendering task templates and searching answers."""

from __future__ import annotations

import re
from typing import Any

import jinja2

from quantkit.text.rendering import Outcome, compile_with, render_with
from quantkit.text.sandbox import MAX_OUTPUT, LimitExceeded, MeteredSandbox


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


def find_all(pattern: str, text: str) -> list[str | tuple[str, ...]]:
    """``re.findall``."""
    return re.findall(pattern, text)


def remove_all(patterns: list[str], text: str) -> str:
    """``text`` without what each pattern matches, one after another."""
    for pattern in patterns:
        text = re.sub(pattern, "", text)
    return text
