"""Text ⇄ token ids, by the model's own ``tokenizer.json``."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quantkit.support.errors import QuantkitError, SourceError, UsageError
from quantkit.support.strict_json import parse_object
from quantkit.text import library
from quantkit.text.chat import ChatTemplate
from quantkit.text.controls import ControlTokens
from quantkit.text.length import TokenLength, token_length

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
_USUAL = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
"""A conversation whose rendering shows a template's own tokens."""
_ANSWER = "quantkit"
"""What an assistant says in a conversation that shows how its turn ends."""
_CONTROL_LIKE = re.compile(r"<[|｜][^\s<>]+[|｜]>|</?[a-z_]+>")
_BRACKETED = re.compile(r"[^\w\s].*[^\w\s]")
"""How a token looks that is neither a word nor space."""
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "answer", "self"})
"""Names that no option of a template may have."""
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_HELD = 32
"""Ids that may be held back; a character has four bytes, so more than that is no character."""
_BROKEN = "\ufffd"


class StreamDecoder:
    """Decodes ids that arrive one at a time into text, without splitting a character: it holds back
    what is not yet certain and puts out the rest at once.

    What a token looks like depends on the ones before it (a word's leading space, a byte of a
    character), so a token is decoded behind the tokens of the previous piece, and its text is what
    that adds. Cost a token: the length of two pieces, however long the text.

    Args:
        decode: ids → text; unfinished characters as U+FFFD.
        kept: texts of special tokens that ``decode`` leaves out and that are wanted nevertheless.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str],
                 kept: Mapping[int, str] = MappingProxyType({})) -> None:
        self._decode, self._kept = decode, kept
        self._context: list[int] = []  # the ids of the last piece
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Add an id; returns the text that is now certain, often one word, sometimes nothing."""
        if token in self._kept:  # no character goes on behind it; the context stays, as decode skips it too
            return self._take(final=True) + self._kept[token]
        self._held.append(token)
        return self._take(final=len(self._held) > MAX_HELD)

    def finish(self) -> str:
        """What was held back; the decoder is then ready for another sequence."""
        out = self._take(final=True)
        self._context, self._held = [], []
        return out

    def _take(self, final: bool) -> str:
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        fresh = text[len(before):]
        if not fresh or (fresh.endswith(_BROKEN) and not final):
            if final:  # tokens without text, of which there may be any number
                self._held = []
            return ""
        self._context, self._held = self._held, []
        return fresh


class Tokenizer:
    """A model's tokenizer.

    Args:
        files: side files by name; ``tokenizer.json`` is needed.
        config: the model's ``config.json``, for ``eos_token_id``.

    Attributes:
        bos_id: beginning-of-sequence id, or ``None`` if the model has none.
        eos_id: the one that the tokenizer itself calls so, or ``None``.

    Raises:
        SourceError: no ``tokenizer.json``, or an unreadable one; from any method, when the tokenizer fails.
    """

    def __init__(self, files: Mapping[str, bytes], config: Mapping[str, Any]) -> None:
        self._files = files
        self._inner = library.read_tokenizer(files)
        self._settings = _json(files, SETTINGS)
        tokens = {role: _token(self._settings, role) for role in _ROLES}
        self._special = {role: token for role, token in tokens.items() if token is not None}
        self.bos_id, self.eos_id = self._id("bos_token"), self._id("eos_token")
        self._stored_ends = self._eos_ids(_json(files, GENERATION), config)

    @property
    def vocab_size(self) -> int:
        """Ids that mean something; a model may have more rows than that."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: those that the model's files name, and the control token that the
        chat template writes behind what an assistant says. Warns where nothing ends one."""
        end, added = self._turn_end(), self.added_tokens
        if end in added:
            return self._stored_ends | {added[end]}
        if end:
            warnings.warn(f"the chat template ends a turn with {end}, which is no control token of the "
                          "tokenizer: answers may go on behind it, unless it is given as a stop text",
                          stacklevel=2)
        elif not self._stored_ends:
            warnings.warn("no token is known to end an answer of this model, which is as long as it may be: "
                          "give a stop text, or name the token as eos_token_id in generation_config.json",
                          stacklevel=2)
        return self._stored_ends

    def _turn_end(self) -> str:
        """What the chat template writes behind an assistant's message, if it is a control token or looks so;
        empty otherwise."""
        known = [token.content for token in self._inner.get_added_tokens_decoder().values() if token.special
                 or token.content in self._special.values() or _BRACKETED.fullmatch(token.content)]
        for before in (_USUAL[:2], _USUAL[1:2]):  # some templates know no system
            for behind in ([], _USUAL[3:]):  # what ends a turn may be what begins the next one
                try:
                    turns = [*before, {"role": "assistant", "content": _ANSWER}, *behind]
                    text = self.chat_text(turns, answer=False)
                except QuantkitError:  # whoever chats is told
                    break
                rest = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
                ends = [token for token in known if rest.startswith(token)]
                if ends:
                    return max(ends, key=len)
                if not behind and (match := _CONTROL_LIKE.match(rest)):
                    return match[0]
        return ""

    @functools.cached_property
    def first_id(self) -> int | None:
        """The BOS that the tokenizer puts in front of every text, whether or not its settings call it so;
        ``None`` if it puts none."""
        ids, plain = (library.encode(self._inner, "a", special) for special in (True, False))
        return ids[0] if plain and ids[1:1 + len(plain)] == plain else None

    def encode(self, text: str, special: bool = True, *, parse_special: bool = True) -> list[int]:
        """Ids of ``text``.

        Args:
            special: also put around it what the post-processor of ``tokenizer.json`` does, a BOS for
                instance; it alone decides, as in transformers 5 (``add_bos_token`` of
                ``tokenizer_config.json`` only describes it). A text that already begins with BOS
                doesn't get a second one.
            parse_special: control tokens written out in the text become their ids; otherwise they are
                text like any other.

        Raises:
            UsageError: the text holds half a surrogate pair.
        """
        if not parse_special:
            return self.controls.plain(text, special)
        ids = library.encode(self._inner, text, special)
        if special and len(ids) > 1 and ids[0] == ids[1] == self.first_id:
            plain = library.encode(self._inner, text, False)
            if ids[1:1 + len(plain)] == plain:
                del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return library.decode(self._inner, ids, skip_special)

    def prepare(self) -> None:
        """Work out now what the first conversation would otherwise wait for."""
        with contextlib.suppress(SourceError):  # whoever needs what is broken is told
            self.controls.typed_in("")
            self.least_tokens("")

    def least_tokens(self, text: str) -> int:
        """How few tokens ``text`` can have, from its length alone; 0 where its length says nothing."""
        return 0 if self._length is None else self._length.least(text)

    def chat(self, messages: Sequence[Mapping[str, Any]], check: Callable[[str], None] | None = None, *,
             parse_special: bool = False, tools: Sequence[Mapping[str, Any]] | None = None,
             options: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Ids of a conversation in the model's own format, ready for its answer.

        Args:
            messages: ``role`` (``system``, ``user``, ``assistant``, ``tool``) and ``content`` each, and what
                else the template knows, such as ``tool_calls`` and ``reasoning_content``.
            check: called with the text before it is encoded; may refuse it.
            parse_special: control tokens written out in messages, tools and options become their ids, so that
                a message can end its turn and open a role; otherwise only the template's own do, and marks
                such as ``</think>`` in the content of assistants' messages.
            tools: functions that the model may call, as in OpenAI's requests.
            options: the template's own, such as ``enable_thinking``.

        Raises:
            SourceError: the model has no chat template, or it fails.
            UsageError: a text holds half a surrogate pair, or an option has a name that isn't the template's
                to give.
        """
        for name in options:
            if not name.isidentifier() or name in _RESERVED or name in self._special:
                raise UsageError(f"{name[:80]!r} is no option of a chat template",
                                 why="the name is taken, or isn't one",
                                 next="leave it out of the template's options")
        stand_ins = None
        if not parse_special:
            messages, (tools, values), stand_ins = self.controls.hide(messages, tools, list(options.values()))
            options = dict(zip(options, values, strict=True))
        text = self.chat_text(messages, True, tools, options)
        if check is not None:
            check(text)
        if stand_ins is None:
            return self.encode(text, special=False)
        return self.controls.encode(text, stand_ins)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], answer: bool = True,
                  tools: Sequence[Mapping[str, Any]] | None = None,
                  options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What :meth:`chat` encodes: the conversation as the chat template writes it, with or without
        the beginning of an ``answer``."""
        if self._template is None:
            raise SourceError("the model has no chat template",
                              why="it is a base model, or its template was lost",
                              next="leave out --chat, or start a server with --chat-template FILE")
        return self._template.render(messages, answer, tools, options, **self._special)

    @functools.cached_property
    def controls(self) -> ControlTokens:
        """The tokens that mean something beside their text. Those that ``tokenizer.json`` calls special, that
        end a text, that ``tokenizer_config.json`` names or that the chat template writes around messages
        begin and end turns; what else is written in the template marks parts of them."""
        turns = self._usual(False)
        answer = self._usual(True)
        source = ""
        with contextlib.suppress(SourceError):  # whoever chats is told
            source = self.template_text
        added = self._inner.get_added_tokens_decoder()
        bracketed = {number: token.content for number, token in added.items()
                     if _BRACKETED.fullmatch(token.content)}
        ids = {number for number, token in added.items()
               if token.special or token.content in self._special.values()}
        ids |= {number for number, text in bracketed.items() if text in turns}
        marks = {number for number, text in bracketed.items() if text in source or text in answer}
        return ControlTokens(self._inner, self.eos_ids | ids, frozenset(marks),
                             lambda: library.read_tokenizer(self._files))

    def _usual(self, answer: bool) -> str:
        """How the template writes a usual conversation; where it takes only one question, the beginning of
        the answer is the only turn of the assistant's that it shows."""
        for messages in (_USUAL, _USUAL[1:], _USUAL[1:2]):  # some templates know no system, or one question
            try:
                return self.chat_text(messages, answer or len(messages) == 1)
            except SourceError:
                continue
        return ""

    def use_template(self, source: str) -> None:
        """Write chats by this Jinja template, whatever the model's files have. Before the first chat.

        Raises:
            TemplateError: too large, or not a template.
        """
        self._template = ChatTemplate(source)
        self.__dict__.pop("eos_ids", None)

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template. SourceError if there is one that can't be used."""
        return self._template is not None

    @property
    def template_text(self) -> str:
        """The chat template as it is written; empty if there is none. SourceError if it can't be used."""
        return "" if self._template is None else self._template.source

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self._inner.get_vocab(with_added_tokens=True))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, which :meth:`decode` leaves out, by their texts."""
        return {token.content: number for number, token in self._inner.get_added_tokens_decoder().items()
                if token.special}

    @property
    def role_ids(self) -> dict[str, int]:
        """Ids of the tokens that ``tokenizer_config.json`` gives a role, by that: ``pad_token``."""
        return {role: number for role in self._special if (number := self._id(role)) is not None}

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of all tokens that were added to the vocabulary, special or not, by their texts."""
        return {token.content: number for number, token in self._inner.get_added_tokens_decoder().items()}

    def special_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Ids of those of these texts that are special tokens."""
        return frozenset(number for text, number in self.special_tokens.items() if text in texts)

    def serialized(self) -> str:
        """``tokenizer.json`` as it is used: nothing cut, nothing padded."""
        return str(self._inner.to_str())

    def stream(self, keep_special: frozenset[int] = frozenset()) -> StreamDecoder:
        """A decoder for ids that come one at a time; of special tokens only those to keep have a text."""
        if not keep_special:
            return StreamDecoder(self.decode)
        added = self._inner.get_added_tokens_decoder()
        return StreamDecoder(self.decode, {number: added[number].content for number in keep_special
                                           if number in added})

    @functools.cached_property
    def _length(self) -> TokenLength | None:
        try:
            return token_length(_json(self._files, library.FILE))
        except SourceError:  # the library reads what a stricter reader refuses
            return None

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        # read when it is first needed: a template nobody uses must not keep a model from loading
        return ChatTemplate.find(self._files, self._settings)

    def _id(self, role: str) -> int | None:
        token: int | None = self._inner.token_to_id(self._special[role]) if role in self._special else None
        return token

    def _eos_ids(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for value in (generation.get("eos_token_id"), config.get("eos_token_id"), self.eos_id):
            ids |= {v for v in (value if isinstance(value, list) else [value]) if type(v) is int}
        return frozenset(ids)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    return parse_object(files[name], name, next="get the model's tokenizer files again")


def _token(settings: Mapping[str, Any], role: str) -> str | None:
    """A special token as ``"<s>"`` or as ``{"content": "<s>", …}``."""
    value = settings.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
