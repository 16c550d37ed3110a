"""A grammar in Lark's notation as one regular expression, where it doesn't refer to itself.

A tool's input of such a grammar comes as a JSON string, whose characters are escaped. A regular expression
can be applied to what the string means (``pattern`` of its schema); a grammar only to what stands there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_DEPTH = 32
"""Rules and parentheses within each other."""
COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]", "INT": "[0-9]+", "HEXDIGIT": "[0-9a-fA-F]", "SIGNED_INT": "[+-]?[0-9]+",
    "LETTER": "[a-zA-Z]", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"}
"""Terminals of Lark's own library."""
_TOKEN = re.compile(r"""
    \s+ | //[^\n]* | (?P<string>"(?:[^"\\\n]|\\.)*"i?) | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imsux]*)
    | (?P<alias>->\s*\w+) | (?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d*,?\d*\}) | (?P<range>\.\.)
    | (?P<name>[A-Za-z_]\w*) | (?P<sign>[()\[\]|?*+])""", re.VERBOSE)
_RULE = re.compile(r"^[?!]*(\w+)(?:\.-?\d+)?\s*:(?!:)", re.MULTILINE)
_IMPORT = re.compile(r"^%import\s+common\s*(?:\.(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*$", re.MULTILINE)
_ESCAPES = "\\\"'abfnrtvxuUN01234567"
"""What may follow a backslash in Python's texts."""
Token = tuple[str, str]


class NotRegularError(ValueError):
    """A grammar is no regular expression, or is written in a way that isn't read; it says why."""


def regular_expression(grammar: str, limit: int) -> str:
    """The expression that matches all of a text of the grammar, in Rust's syntax.

    Args:
        grammar: in Lark's notation; the first rule is ``start``.
        limit: characters that it may have.

    Raises:
        NotRegularError: there is none.
    """
    return _Writer(grammar, limit).rule("start", ())


class _Writer:
    def __init__(self, grammar: str, limit: int) -> None:
        self._limit, self._known = limit, dict[str, str]()

        def imported(match: re.Match[str]) -> str:
            names = [(match[1], match[2])] if match[1] else [
                (name.strip(), None) for name in match[3].split(",")]
            for name, alias in names:
                if name not in COMMON:
                    raise NotRegularError(f"common.{name} isn't known")
                self._known[alias or name] = COMMON[name]
            return ""

        grammar = _IMPORT.sub(imported, grammar)
        if directive := re.search(r"^%\w+", grammar, re.MULTILINE):
            raise NotRegularError(f"{directive[0]} isn't supported")
        begins = [*_RULE.finditer(grammar)]
        if not begins or grammar[:begins[0].start()].strip():
            raise NotRegularError("it doesn't begin with a rule")
        ends = [*(match.start() for match in begins[1:]), len(grammar)]
        self._rules = {match[1]: grammar[match.end():end] for match, end in zip(begins, ends, strict=True)}

    def rule(self, name: str, within: tuple[str, ...]) -> str:
        """The expression of a rule."""
        if name not in self._known:
            if name in within:
                raise NotRegularError(f"the rule {name} refers to itself")
            if name not in self._rules:
                raise NotRegularError(f"there is no rule {name}")
            if len(within) > MAX_DEPTH:
                raise NotRegularError("it is too deep")
            tokens = _Tokens(_tokens(self._rules[name]))
            self._known[name] = self._alternatives(tokens, (*within, name), 0)
            if tokens.kind:
                raise NotRegularError(f"{tokens.text!r} isn't expected in the rule {name}")
        return self._known[name]

    def _alternatives(self, tokens: _Tokens, within: tuple[str, ...], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise NotRegularError("it is too deep")
        options = [self._sequence(tokens, within, depth)]
        while tokens.text == "|" and tokens.kind == "sign":
            tokens.take()
            options.append(self._sequence(tokens, within, depth))
        return self._bounded(options[0] if len(options) == 1 else f"(?:{'|'.join(options)})")

    def _sequence(self, tokens: _Tokens, within: tuple[str, ...], depth: int) -> str:
        sequence = ""
        while tokens.kind and not (tokens.kind == "sign" and tokens.text in "|)]"):
            if tokens.kind == "alias":
                tokens.take()
                continue
            item = self._item(tokens, within, depth)
            while tokens.kind == "repeat" or (tokens.kind == "sign" and tokens.text in "?*+"):
                item = f"(?:{item}){_repeat(tokens.take())}"
            sequence = self._bounded(sequence + item)
        return sequence

    def _item(self, tokens: _Tokens, within: tuple[str, ...], depth: int) -> str:
        kind, text = tokens.kind, tokens.take()
        if kind == "name":
            return f"(?:{self.rule(text, within)})"
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            flags = flags.replace("u", "")
            return f"(?{flags}:{body})".replace(r"\/", "/")
        if kind == "string":
            first = _text(text)
            if tokens.kind == "range":
                tokens.take()
                last = _text(tokens.take()) if tokens.kind == "string" else ""
                if len(first) != 1 or len(last) != 1:
                    raise NotRegularError("a range isn't from a character to a character")
                return f"[{_escaped(first)}-{_escaped(last)}]"
            return f"(?i:{_escaped(first)})" if text.endswith("i") else _escaped(first)
        if kind == "sign" and text in "([":
            inside = self._alternatives(tokens, within, depth + 1)
            if tokens.take() != {"(": ")", "[": "]"}[text]:
                raise NotRegularError("a parenthesis isn't closed")
            return f"(?:{inside}){'?' if text == '[' else ''}"
        raise NotRegularError(f"{text!r} isn't expected")

    def _bounded(self, regex: str) -> str:
        if len(regex) > self._limit:
            raise NotRegularError(f"it has more than {self._limit} characters as a regular expression")
        return regex


class _Tokens:
    """Tokens of a rule, one of which is looked at; at the end its kind is empty."""

    def __init__(self, tokens: Iterator[Token]) -> None:
        self._tokens = tokens
        self.kind, self.text = next(self._tokens, ("", ""))

    def take(self) -> str:
        """The token's text; the next one is looked at then."""
        taken = self.text
        self.kind, self.text = next(self._tokens, ("", ""))
        return taken


def _tokens(rule: str) -> Iterator[Token]:
    position = 0
    while position < len(rule):
        match = _TOKEN.match(rule, position)
        if match is None:
            raise NotRegularError(f"{rule[position:position + 20]!r} can't be read")
        position = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match[0]


def _repeat(text: str) -> str:
    if text in "?*+" or text.startswith("{"):
        return text
    return "{" + re.sub(r"\s*\.\.\s*", ",", text[1:].strip()) + "}"


def _text(string: str) -> str:
    # Python would print a warning about an escape that it doesn't know, and keep its backslash
    string = re.sub(r"\\(.)", lambda escape: escape[0] if escape[1] in _ESCAPES else rf"\{escape[0]}", string)
    try:
        return str(ast.literal_eval(string.removesuffix("i")))
    except (SyntaxError, ValueError):
        raise NotRegularError(f"{string[:20]!r} is no text") from None


def _escaped(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text).replace("\n", r"\n").replace(
        "\r", r"\r").replace("\t", r"\t")
