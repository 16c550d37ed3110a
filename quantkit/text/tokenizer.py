"""Text ⇄ token ids, by the model's own ``tokenizer.json``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from quantkit.errors import SourceError
from quantkit.text.chat import ChatTemplate
from quantkit.text.length import TokenLength, token_length
from quantkit.text.stream import StreamDecoder

FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer.

    Args:
        files: side files by name; ``tokenizer.json`` is needed.
        config: the model's ``config.json``, for ``eos_token_id``.

    Attributes:
        bos_id: beginning-of-sequence id, or ``None`` if the model has none.
        eos_ids: every id that ends a sequence.
        eos_id: the one that the tokenizer itself calls so, or ``None``.

    Raises:
        SourceError: no ``tokenizer.json``, or an unreadable one.
    """

    def __init__(self, files: Mapping[str, bytes], config: Mapping[str, Any]) -> None:
        self._files = files
        self._inner = _read(files)
        self._settings = _json(files, SETTINGS)
        found = {role: _token(self._settings, role) for role in _ROLES}
        self._special = {role: token for role, token in found.items() if token is not None}
        self.bos_id, self.eos_id = self._id("bos_token"), self._id("eos_token")
        self.eos_ids = self._eos_ids(_json(files, GENERATION), config)

    @property
    def vocab_size(self) -> int:
        """Ids that mean something; a model may have more rows than that."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of ``text``.

        Args:
            text: special tokens written out in it become their ids.
            special: also put around it what the post-processor of ``tokenizer.json`` does, a BOS for
                instance; it alone decides, as in transformers 5 (``add_bos_token`` of
                ``tokenizer_config.json`` only describes it). A text that already begins with BOS
                doesn't get a second one.
        """
        ids = self._ids(text, special)
        if special and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            plain = self._ids(text, False)
            if ids[1:1 + len(plain)] == plain:
                del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def least_tokens(self, text: str) -> int:
        """How few tokens ``text`` can have, from its length alone; 0 where its length says nothing."""
        return 0 if self._length is None else self._length.least(text)

    def chat(self, messages: Sequence[Mapping[str, Any]],
             check: Callable[[str], None] | None = None) -> list[int]:
        """Ids of a conversation in the model's own format, ready for its answer.

        Args:
            messages: ``role`` (``system``, ``user``, ``assistant``) and ``content`` each.
            check: called with the text before it is encoded; may refuse it.

        Raises:
            SourceError: the model has no chat template, or it fails.
        """
        text = self.chat_text(messages)
        if check is not None:
            check(text)
        return self.encode(text, special=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
        """What :meth:`chat` encodes: the conversation as the chat template writes it, with or without
        the beginning of an ``answer``."""
        if self._template is None:
            raise SourceError("the model has no chat template", next="leave out --chat",
                              why="it is a base model, or its template was lost")
        return self._template.render(messages, answer, **self._special)

    @functools.cached_property
    def specials(self) -> frozenset[str]:
        """The tokens that mean something beside their text, as they are written out."""
        added = self._inner.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template. SourceError if there is one that can't be used."""
        return self._template is not None

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one at a time."""
        return StreamDecoder(self.decode)

    @functools.cached_property
    def _length(self) -> TokenLength | None:
        return token_length(_json(self._files, FILE))

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        # read when it is first needed: a template nobody uses must not keep a model from loading
        return ChatTemplate.find(self._files, self._settings)

    def _ids(self, text: str, special: bool) -> list[int]:
        # a batch, because encoding a single text keeps every other thread waiting until it is done
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def _id(self, role: str) -> int | None:
        found: int | None = self._inner.token_to_id(self._special[role]) if role in self._special else None
        return found

    def _eos_ids(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for value in (generation.get("eos_token_id"), config.get("eos_token_id"), self.eos_id):
            ids |= {v for v in (value if isinstance(value, list) else [value]) if type(v) is int}
        return frozenset(ids)


def _read(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    if FILE not in files:
        other = [name for name in _OTHER_FORMS if name in files]
        raise SourceError(
            f"the model has no {FILE}",
            why=f"its tokenizer is in an older form: {', '.join(other)}" if other else
                f"its side files: {', '.join(sorted(files)) or 'none'}",
            next="python -c \"from transformers import AutoTokenizer as T; "
                 "T.from_pretrained('DIR').save_pretrained('DIR')\" writes it into the model's folder DIR"
            if other else "get the model's tokenizer files too")
    try:
        inner = tokenizers.Tokenizer.from_str(files[FILE].decode("utf-8"))
        inner.no_truncation()
        inner.no_padding()
    except BaseException as error:  # the library raises bare Exception, its Rust part PanicException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise SourceError(f"{FILE} can't be read", why=" ".join(str(error).split())[:200],
                          next="get it again, or pip install --upgrade tokenizers") from None
    return inner


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not JSON", why=str(error)[:200],
                          next="get the model's tokenizer files again") from None
    if not isinstance(data, dict):
        raise SourceError(f"{name} is not a JSON object", next="get the model's tokenizer files again")
    return data


def _token(settings: Mapping[str, Any], role: str) -> str | None:
    """A special token as ``"<s>"`` or as ``{"content": "<s>", …}``."""
    value = settings.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
