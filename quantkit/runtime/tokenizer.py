"""Text ⇄ token ids, by the model's own ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from quantkit.errors import SourceError
from quantkit.runtime.chat import ChatTemplate


class Tokenizer:
    """A model's tokenizer.

    Args:
        files: side files by name; ``tokenizer.json`` is needed.
        config: the model's ``config.json``, for ``eos_token_id``.

    Attributes:
        bos_id: beginning-of-sequence id, or ``None`` if the model uses none.
        eos_ids: every id that ends a sequence.

    Raises:
        SourceError: no ``tokenizer.json``, or an unreadable one.
    """

    def __init__(self, files: Mapping[str, bytes], config: Mapping[str, Any]) -> None:
        if "tokenizer.json" not in files:
            other = ", ".join(sorted(files)) or "none"
            raise SourceError("the model has no tokenizer.json", why=f"its tokenizer files: {other}",
                              next="save the tokenizer in its fast form with its authors' tools")
        try:
            self._inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise SourceError("tokenizer.json can't be read", why=str(error)[:200],
                              next="pip install --upgrade tokenizers") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        settings, generation = _json(files, "tokenizer_config.json"), _json(files, "generation_config.json")
        self._bos, self._eos = _token(settings, "bos_token"), _token(settings, "eos_token")
        self.bos_id = self._id(self._bos)
        self.eos_ids = self._eos_ids(generation, config)
        self._chat = ChatTemplate.find(files, settings)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of ``text``; with ``special``, what the tokenizer itself puts around it.

        A text that already begins with the BOS token doesn't get a second one.
        """
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ``ids``; special tokens are left out unless asked for."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=not special)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation in the model's own format, ready for its answer.

        Raises:
            SourceError: the model has no chat template, or it fails.
        """
        if self._chat is None:
            raise SourceError("the model has no chat template", why="it is a base model, or lost its template",
                              next="leave out --chat")
        text = self._chat.render(messages, bos_token=self._bos or "", eos_token=self._eos or "")
        return self.encode(text, special=False)

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._chat is not None

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one at a time."""
        return StreamDecoder(self)

    def _id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._inner.token_to_id(token)
        return found

    def _eos_ids(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for value in (generation.get("eos_token_id"), config.get("eos_token_id"), self._id(self._eos)):
            ids |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
        return frozenset(ids)


class StreamDecoder:
    """Turns ids into text as they come, and never emits half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids before it are settled text
        self._emitted = 0  # of the text of ids from _start on

    def push(self, token: int) -> str:
        """Add an id; returns the text that is now certain, often one word, sometimes nothing."""
        self._ids.append(token)
        return self._emit(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        text = self._tokenizer.decode(self._ids[self._start:])
        if text.endswith("�") and not final and len(self._ids) - self._start < 64:
            return ""
        fresh = text[self._emitted:]
        self._emitted = len(text)
        if len(self._ids) - self._start > 32 and not text.endswith("�"):
            # keep a few ids so that joins between tokens decode as in the whole
            self._start = len(self._ids) - 8
            self._emitted = len(self._tokenizer.decode(self._ids[self._start:]))
        return fresh


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not JSON", why=str(error)[:200]) from None
    return data if isinstance(data, dict) else {}


def _token(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
