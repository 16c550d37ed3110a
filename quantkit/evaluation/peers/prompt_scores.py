"""Log-probabilities of a prompt's own tokens by a completion API, in the ways in which servers have them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.evaluation.peers.base import PeerPrediction
from quantkit.evaluation.peers.http_client import RefusedError
from quantkit.serving.models import TokenTexts
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.text.tokenizer import Tokenizer

ECHO = {"echo": True, "logprobs": 1, "temperature": 0}
WAYS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (False, {"prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}),
    (False, ECHO | {"max_tokens": 0}), (False, ECHO | {"max_tokens": 1}),
    (True, ECHO | {"max_tokens": 0}), (True, ECHO | {"max_tokens": 1}))
"""Whether the prompt is sent as a text, and what else is asked; the first that works is kept. vLLM's own
``prompt_logprobs`` come first, because they name the likeliest token by its id, not by its text."""
UNKNOWN = (400, 404, 405, 422)
"""Status of an answer to what a server doesn't do; any other is a failure."""
BROKEN = "\ufffd"
TOKEN_ID = "token_id:"
"""How vLLM writes ids in the place of texts, if it was started so."""


class PromptScores:
    """Scores windows by one server.

    Args:
        complete: body of a completion → its answer; raises RefusedError.
        tokenizer: the reference's tokenizer.
        tool: the tool's name for messages.
    """

    def __init__(self, complete: Callable[[dict[str, Any]], dict[str, Any]], tokenizer: Tokenizer,
                 tool: str) -> None:
        self._complete = complete
        self._tokenizer = tokenizer
        self._tool = tool
        self._texts = TokenTexts(tokenizer)
        self._ways, self._settled = list(WAYS), False

    def predict(self, ids: Sequence[int], prompt: int) -> PeerPrediction | None:
        while self._ways:
            as_text, body = self._ways[0]
            text = self._tokenizer.decode(list(ids), skip_special=False) if as_text else ""
            try:
                answer = self._complete({"prompt": text if as_text else list(ids), **body})
            except RefusedError as error:
                if error.status not in UNKNOWN:
                    raise QuantkitError(f"{self._tool} refuses to score a window", why=str(error)) from None
                answer = {}
            scores = self._read(answer, ids, as_text)
            if scores is not None:
                self._settled = True
                return _prediction(*scores, prompt)
            if self._settled:
                raise QuantkitError(f"{self._tool} scores some windows and others not")
            del self._ways[0]
        return None

    def _read(self, answer: dict[str, Any], ids: Sequence[int],
              as_text: bool) -> tuple[list[float], list[int | None]] | None:
        """Of each token but the first its log-probability and the likeliest id."""
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return None
        if isinstance(entries := choice.get("prompt_logprobs"), list):
            return self._by_id(entries, ids)
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return None
        values, texts = logprobs.get("token_logprobs"), logprobs.get("tokens")
        if not isinstance(values, list) or not isinstance(texts, list) or len(values) < len(ids):
            return None
        self._check(texts[:len(ids)], ids, answer, as_text)
        if not all(isinstance(value, int | float) for value in values[1:len(ids)]):
            return None
        tops = logprobs.get("top_logprobs")
        tops = tops if isinstance(tops, list) and len(tops) >= len(ids) else [None] * len(ids)
        return ([float(value) for value in values[1:len(ids)]], [self._best(top) for top in tops[1:len(ids)]])

    def _by_id(self, entries: list[Any], ids: Sequence[int]) -> tuple[list[float], list[int | None]] | None:
        """vLLM's ``prompt_logprobs``: id → log-probability and rank, the token that came among them."""
        if len(entries) != len(ids):
            return None
        following: list[float] = []
        likeliest: list[int | None] = []
        for token, entry in list(zip(ids, entries))[1:]:
            if not isinstance(entry, dict) or str(token) not in entry:
                return None
            following.append(float(entry[str(token)]["logprob"]))
            likeliest.append(int(max(entry, key=lambda key: entry[key]["logprob"])))
        return following, likeliest

    def _check(self, texts: list[Any], ids: Sequence[int], answer: dict[str, Any], as_text: bool) -> None:
        """Refuse a server that read other tokens than were meant. Raises UsageError."""
        usage = answer.get("usage")
        count = usage.get("prompt_tokens", len(ids)) if isinstance(usage, dict) else len(ids)
        ours = [self._texts.text(token) for token in ids]
        differs = as_text and any(BROKEN not in text and text != other for text, other in zip(ours, texts))
        if count != len(ids) or differs:
            raise UsageError(f"{self._tool} reads other tokens than the reference",
                             why=f"a window of {len(ids)} tokens has {count} there" if count != len(ids)
                             else "it takes texts only, and splits this one otherwise",
                             next="compare models of one family; no server that puts BOS first")

    def _best(self, top: Any) -> int | None:
        """The id of the likeliest token; ``None`` if its text could be that of several."""
        if not isinstance(top, dict) or not top:
            return None
        text = max(top, key=top.__getitem__)
        if text.startswith(TOKEN_ID) and text.removeprefix(TOKEN_ID).isdigit():
            return int(text.removeprefix(TOKEN_ID))
        return self._by_text.get(text)

    @functools.cached_property
    def _by_text(self) -> dict[str, int]:
        """Text → id, of tokens whose text no other token has."""
        unique: dict[str, int | None] = {}
        for token in range(self._tokenizer.vocab_size):
            text = self._texts.text(token)
            unique[text] = None if text in unique else token
        return {text: token for text, token in unique.items() if token is not None}


def _prediction(following: list[float], likeliest: list[int | None], prompt: int) -> PeerPrediction:
    """Without the prompt; the likeliest tokens if all of them are known."""
    known = [token for token in likeliest[prompt:] if token is not None]
    return PeerPrediction(following=torch.tensor(following[prompt:], dtype=torch.float32),
                          likeliest=torch.tensor(known) if len(known) == len(following) - prompt else None)
