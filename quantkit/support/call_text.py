"""How settings are written on a command line, ``NAME`` or ``NAME(VALUE, NAME=VALUE)``, and what they make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from quantkit.support.errors import UsageError, did_you_mean

Made = TypeVar("Made", bound=BaseModel)
Options = dict[str, int | float | str | bool]
_CALL = re.compile(r'([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\(((?:[^"()]|"[^"]*")*)\))?')
_WHOLE = re.compile(r'[^"]*|"[^"]*"')
_COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # outside of quotes


def read_call(text: str, hint: str) -> tuple[str, Mapping[str | None, int | float | str | bool]]:
    """A name and its options; the key ``None`` is that of the first option, if it stands without its name.
    What is in double quotes may have commas and parentheses.

    Args:
        hint: the remedy to suggest if it can't be read.

    Raises:
        UsageError: it can't be read.
    """
    written = text.strip()
    match = _CALL.fullmatch(written)
    if match is None:
        raise UsageError(f"{written!r} can't be read", next=hint,
                         why="it is not written NAME or NAME(VALUE, NAME=VALUE)")
    options: dict[str | None, int | float | str | bool] = {}
    inside = match[2] or ""
    for number, item in enumerate(_COMMA.split(inside) if inside.strip() else []):
        left, equals, right = (piece.strip() for piece in item.partition("="))
        name, value = (left, right) if equals and '"' not in left else (None, item.strip())
        if name is None and number:
            raise UsageError(f"{written!r} can't be read", next=hint,
                             why="only the first argument may stand without its name")
        if name == "" or value in ("", '""') or name in options or not _WHOLE.fullmatch(value):
            raise UsageError(f"{written!r} can't be read", next=hint,
                             why=f"{item.strip()!r} is empty, given twice, or not all in quotes")
        options[name] = _value(value)
    return match[1], options


def named_options(options: Mapping[str | None, int | float | str | bool], first: str, text: str,
                  hint: str) -> Options:
    """The same options, the first under its name ``first``. Raises UsageError: it is given twice."""
    if None in options and first in options:
        raise UsageError(f"{text.strip()!r} can't be read", why=f"{first!r} is given twice", next=hint)
    return {first if name is None else name: value for name, value in options.items()}


def made_with(kind: type[Made], options: Mapping[str, object], what: str, see: str,
              hint: str | None) -> Made:
    """A ``kind`` with these options.

    Args:
        kind: a model whose fields are the options.
        options: the options by name.
        what: how messages name it: ``drafter 'ngram'``.
        see: the page that describes the options.
        hint: the remedy to suggest for a value that is off.

    Raises:
        UsageError: an option is unknown, missing or out of range.
    """
    for option in options:
        if option not in kind.model_fields:
            raise UsageError(f"the {what} has no option {option!r}", next=f"leave it out, or see {see}",
                             why=did_you_mean(option, kind.model_fields))
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its options"
        raise UsageError(f"the {what} can't be made", why=f"{where}: {first['msg']}", next=hint) from None


def _value(text: str) -> int | float | str | bool:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
