"""Control tokens such as ``<|im_end|>``: a template's open roles, a user's stay plain text.

A tokenizer finds control tokens wherever they are written, so a message could end its own turn and begin
another role's. Two things keep it from that:

- Before a template sees messages and tools, every control token typed in them is replaced by a stand-in, one
  character of Unicode's private use areas that no message has. Templates may strip, cut and join the text as
  ever. Marks within a turn, such as ``</think>`` and ``<tool_call>``, stay in an assistant's content: there
  the model wrote them, and templates look for them.
- In the template's result the remaining control tokens are its own. The result is encoded by a twin of the
  tokenizer that knows control tokens by secret names only, which are put in their places; stand-ins become
  what was typed. The tokenizer's own rules apply to both, as one text.

The twin is made when a control token is first typed. Other conversations are encoded as they are; should more
control tokens come out of one than its template wrote (a normalizer can turn ``＜s＞`` into ``<s>``), it is
encoded by the twin too.
"""

from __future__ import annotations

import functools
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from quantkit.support.errors import SourceError, UsageError
from quantkit.text import library

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

_UNKNOWN = "\U0010FFFD"
"""A character that no vocabulary has."""

ASSISTANT, CONTENT = "assistant", "content"


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        inner: the library's tokenizer.
        ids: ids of control tokens that begin and end turns and texts. Those that aren't among the added
            tokens are ignored, as the tokenizer doesn't look for them either.
        marks: ids of those that the template has within turns, around reasoning, calls and results.
        make: makes the same tokenizer again.

    Attributes:
        ids: id by token, without marks.
        marks: id by token of the marks that are no such control tokens.
    """

    def __init__(self, inner: tokenizers.Tokenizer, ids: frozenset[int], marks: frozenset[int],
                 make: Callable[[], tokenizers.Tokenizer]) -> None:
        self._inner, self._make = inner, make
        added = {number: token for number, token in inner.get_added_tokens_decoder().items()
                 if number in ids | marks and token.content}
        self._added = {token.content: token for token in added.values()}
        self._all = {token.content: number for number, token in added.items()}
        self.ids = {token: number for token, number in self._all.items() if number in ids}
        self.marks = {token: number for token, number in self._all.items() if token not in self.ids}
        self._written, self._of_turns = _any_of(self._all), _any_of(self.ids)
        with library.guarded("the model's tokenizer failed"):  # what any text may yield
            unknown = {token.id for token in inner.model.tokenize(_UNKNOWN)}
        self._watched = frozenset(self._all.values()) - unknown

    def typed_in(self, text: str) -> bool:
        """Whether a control token that begins or ends turns or texts is written in a text."""
        return self._of_turns.search(text) is not None

    def hide(self, messages: Sequence[Mapping[str, Any]],
             *others: Any) -> tuple[list[dict[str, Any]], list[Any], dict[str, str]]:
        """Messages and other values with stand-ins for the control tokens in them, and what each stands for.

        Args:
            messages: marks stay in the content of those whose role is the assistant's.
            others: tools, for instance: texts, and lists and mappings of them, however deep.

        Raises:
            UsageError: no private character is left to stand in.
        """
        texts = list(_texts([messages, others]))
        if not any(map(self._written.search, texts)):
            return [dict(message) for message in messages], list(others), {}
        used = set().union(*map(set, texts))
        free = (chr(code) for codes in _PRIVATE for code in codes if chr(code) not in used)
        stand_ins: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            if match[0] not in stand_ins:
                if (character := next(free, None)) is None:
                    raise UsageError("a message uses every private character of Unicode",
                                     why="one is needed to keep the control tokens in it apart",
                                     next="leave some out")
                stand_ins[match[0]] = character
            return stand_ins[match[0]]

        def hidden(value: Any, tokens: re.Pattern[str] = self._written) -> Any:
            return _changed(value, lambda text: tokens.sub(stand_in, text))

        out = [hidden(message) for message in messages]
        for message, changed in zip(messages, out, strict=True):
            if message.get("role") == ASSISTANT and CONTENT in message:
                changed[CONTENT] = hidden(message[CONTENT], self._of_turns)
        return out, hidden(others), {character: token for token, character in stand_ins.items()}

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Ids of a template's result, nothing put around them.

        Args:
            text: control tokens in it are the template's own.
            stand_ins: the typed token of each stand-in, from :meth:`hide`.

        Raises:
            SourceError: the tokenizer fails, or has a typed token in its vocabulary as plain text.
        """
        if not stand_ins:
            ids = library.encode(self._inner, text, False)
            count = sum(self._all[match[0]] in self._watched for match in self._written.finditer(text))
            if sum(token in self._watched for token in ids) == count:
                return ids
        return self._apart(text, stand_ins, False)

    def plain(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text in which nothing is a control token; ``special``: with the tokenizer's around it."""
        if self._written.search(text) is None:
            ids = library.encode(self._inner, text, False)
            if self._watched.isdisjoint(ids):
                return library.encode(self._inner, text, True) if special else ids
        _, (hidden,), stand_ins = self.hide([], text)
        return self._apart(hidden, stand_ins, special)

    def _apart(self, text: str, stand_ins: Mapping[str, str], special: bool) -> list[int]:
        twin, secret, real, cut = self._twin
        text = self._written.sub(lambda match: secret[match[0]], text)
        for between in ("", cut):  # the second time, typed tokens are cut in two
            typed = {ord(character): token[:1] + between + token[1:]
                     for character, token in stand_ins.items()}
            ids = library.encode(twin, text.translate(typed), special)
            around = library.encode(twin, "", special) if special else []
            if sum(token in self._watched for token in ids) <= sum(token in self._watched
                                                                   for token in around):
                cut_id = twin.token_to_id(cut)
                return [real.get(token, token) for token in ids if token != cut_id]
        raise SourceError("the tokenizer can't write a control token as plain text",
                          why="its vocabulary has it as a word", next="leave it out of the message")

    @functools.cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int], str]:
        """The twin; token → its secret name there; its id there → the real one; what cuts a word in two."""
        twin = self._make()
        secret = {token: _secret() for token in self._added}
        cut = _secret()
        with library.guarded("the model's tokenizer failed"):
            twin.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in self._added])
            twin.encode_special_tokens = True  # those are text like any other
            twin.add_tokens([tokenizers.AddedToken(
                secret[token], single_word=token_info.single_word, lstrip=token_info.lstrip,
                rstrip=token_info.rstrip, normalized=token_info.normalized)
                             for token, token_info in self._added.items()])
            twin.add_tokens([tokenizers.AddedToken(cut, normalized=False)])
            real = {number: self._all[token] for token in self._added
                    if (number := twin.token_to_id(secret[token])) is not None}
        return twin, secret, real, cut


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest first, as the tokenizer takes them."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"\b\B")


def _secret() -> str:
    # lower-case letters: what normalizers leave as it is
    return "<|" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(32)) + "|>"


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():  # keys too: names of a tool's parameters, for instance
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list | tuple) else value
