"""Renders templates in a separate process, which runs :func:`compiles` and :func:`render`.

The sandbox's meter ends a template between two operations, with a good message. What a single operation
costs, in time or memory, is bounded by the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jinja2

from quantkit.support import isolation
from quantkit.text.sandbox import MAX_SECONDS, LimitExceeded, MeteredSandbox, UsageMeter

SECONDS = MAX_SECONDS + 0.2
"""For one rendering; a little more than the meter gives, whose message says more."""
MEMORY = 2**30
"""Bytes of address space of the process that renders."""
_COMPILED = 64
"""Templates that a process remembers."""
_REFUSED = (jinja2.TemplateError, LimitExceeded)

Outcome = dict[str, str]
"""``text``; or why there is none, under ``malformed`` (it is no template), ``refused`` (it refuses what it is
given, or is refused more time, work or access) or ``failed``."""


def start() -> None:
    """Start the process that renders now; the first conversation then doesn't wait for it."""
    isolation.start(__name__, MEMORY)


def ask(function: str, arguments: Mapping[str, Any]) -> Outcome:
    """Call one of a rendering module's functions where it can do no harm.

    Args:
        function: its name, ``package.module:name``.

    Raises:
        QuantkitError: no process can be started.
    """
    try:
        outcome: Outcome = isolation.call(function, dict(arguments), seconds=SECONDS, memory=MEMORY)
        return outcome
    except isolation.LimitError as error:
        return {"refused": f"it {error}"}
    except isolation.RaisedError as error:
        return {"failed": str(error)}


def compiles(source: str) -> Outcome:
    """Whether a chat template is one: ``{}`` or ``malformed``."""
    return compile_with(MeteredSandbox, source)


def render(source: str, values: dict[str, Any]) -> Outcome:
    """A chat template's text."""
    return render_with(MeteredSandbox, source, values)


def compile_with(sandbox: Callable[[], MeteredSandbox], source: str) -> Outcome:
    """The same by another sandbox. Its compiler evaluates constants: it may take as long as rendering."""
    try:
        _template(sandbox, source)
        return {}
    except Exception as error:
        return {"malformed": reason(error)}


def render_with(sandbox: Callable[[], MeteredSandbox], source: str, values: dict[str, Any]) -> Outcome:
    """The same by another sandbox."""
    try:
        template = _template(sandbox, source)
    except Exception as error:
        return {"malformed": reason(error)}
    assert isinstance(template.environment, MeteredSandbox)
    template.environment.meter = UsageMeter()
    try:
        return {"text": "".join(template.generate(values))}
    except _REFUSED as error:
        return {"refused": reason(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {reason(error)}"}


@functools.lru_cache(_COMPILED)
def _template(sandbox: Callable[[], MeteredSandbox], source: str) -> jinja2.Template:
    environment = sandbox()
    return jinja2.Template.from_code(environment, environment.compile(source), environment.globals)


def reason(error: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
