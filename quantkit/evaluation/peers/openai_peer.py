"""Any server with OpenAI's API as a row: ``openai(http://127.0.0.1:8000, model=NAME)``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from quantkit.evaluation.peers.base import Peer, PeerFacts, PeerPrediction, PeerSession, PeerTimes
from quantkit.evaluation.peers.http_client import RefusedError, ServerClient
from quantkit.evaluation.peers.prompt_scores import PromptScores
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


class OpenAIPeer(Peer):
    """A model behind ``/v1/completions``.

    Attributes:
        url: the server's address, with or without ``/v1``.
        model: its name there; empty: the only one.
        key_env: variable of the environment that has the API key. It is in no report, as a key would be.
        timeout: seconds that the server may be silent.
    """

    name: ClassVar[str] = "openai"
    first: ClassVar[str] = "url"

    url: str = Field(min_length=1)
    model: str = ""
    key_env: str = ""
    timeout: float = Field(default=600, gt=0)

    @property
    def uri(self) -> str:
        return self.url

    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> OpenAISession:
        return OpenAISession(ServerClient(self.url, self.key_env, self.timeout), self.model, tokenizer)


class OpenAISession(PeerSession):
    """A model of a server.

    Args:
        client: the connection to the server.
        model: the model's name; empty: the only one.
        tokenizer: the reference's tokenizer, for servers that take or give texts only.
    """

    def __init__(self, client: ServerClient, model: str, tokenizer: Tokenizer) -> None:
        self._client, self._tokenizer = client, tokenizer
        listed = self._models()
        names = [str(entry.get("id")) for entry in listed]
        if not model and len(names) != 1:
            raise UsageError(f"{client.url} serves {len(names)} models", why=", ".join(names)[:200] or None,
                             next="openai(URL, model=NAME)")
        self._model = model or names[0]
        if model and names and model not in names:
            raise UsageError(f"{client.url} serves no {model!r}", why="it has " + ", ".join(names)[:200],
                             next="openai(URL, model=NAME)")
        owner = next((entry.get("owned_by") for entry in listed if entry.get("id") == self._model), None)
        tool = " ".join(filter(None, (owner if isinstance(owner, str) else "server", self._version())))
        self.facts = PeerFacts(tool=tool[:80], method=self._model)
        self._scores = PromptScores(self._complete, tokenizer, tool)
        self._as_text = False

    def encode(self, text: str) -> list[int] | None:
        """By ``/tokenize``, as vLLM has it, or as llama.cpp's server has it."""
        for body in ({"model": self._model, "prompt": text, "add_special_tokens": False},
                     {"content": text, "add_special": False}):
            try:
                ids = self._client.ask("/tokenize", body).get("tokens")
            except (RefusedError, QuantkitError):  # it isn't a part of the API
                continue
            if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
                return ids
        return None

    def predict(self, ids: Sequence[int], prompt: int) -> PeerPrediction | None:
        """Log-probabilities of the prompt's tokens, where the server gives those."""
        return self._scores.predict(ids, prompt)

    def time(self, prompts: Sequence[Sequence[int]], decode: int) -> PeerTimes:
        """By streaming, one request at a time."""
        runs = [self._timed(list(ids), decode) for ids in prompts][1:]
        first = tuple(run["first"] for run in runs if "first" in run)
        return PeerTimes(prefill_tok_s=tuple(run["prefill"] for run in runs if "prefill" in run),
                         decode_tok_s=tuple(run["decode"] for run in runs if "decode" in run),
                         first_token_s=first)

    def close(self) -> None:
        """Nothing stays open between requests."""

    def _timed(self, ids: list[int], decode: int) -> dict[str, float]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": decode + 1, "temperature": 0,
                                "stream": True, "stream_options": {"include_usage": True}}
        text = self._tokenizer.decode(ids, skip_special=False)
        for as_text, more in ((self._as_text, {"ignore_eos": True}), (self._as_text, {}), (True, {})):
            request = {**body, **more, "prompt": text if as_text else ids}
            try:
                result = self._stream(request, len(ids))
            except RefusedError as error:
                refused = error
                continue
            self._as_text = as_text
            return result
        raise _failed(self._client.url, refused)

    def _stream(self, request: dict[str, Any], length: int) -> dict[str, float]:
        """Seconds to the first token, and tokens a second before and after it, as far as they are known."""
        begin, texts = time.perf_counter(), 0
        arrived: list[float] = []
        usage: dict[str, Any] = {}
        for event in self._client.stream(COMPLETIONS, request):
            choices = event.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            if isinstance(choice, dict) and (choice.get("text") or (arrived and choice.get("finish_reason"))):
                arrived.append(time.perf_counter())
                texts += bool(choice.get("text"))
            if isinstance(event.get("usage"), dict):
                usage = event["usage"]
        if not arrived:
            return {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        same = usage.get("prompt_tokens", length) == length and not cached
        result = {"first": arrived[0] - begin} if same else {}
        if same:
            result["prefill"] = length / result["first"]
        count = usage.get("completion_tokens", texts)
        if count > 1 and arrived[-1] > arrived[0]:
            result["decode"] = (count - 1) / (arrived[-1] - arrived[0])
        return result

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.ask(COMPLETIONS, {"model": self._model, **body})

    def _models(self) -> list[dict[str, Any]]:
        try:
            data = self._client.ask("/v1/models").get("data")
        except RefusedError as error:
            if error.status in (404, 405):  # the list is a convenience
                return []
            raise _failed(self._client.url, error) from None
        return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []

    def _version(self) -> str | None:
        try:
            version = self._client.ask("/version").get("version")
        except (RefusedError, QuantkitError):  # only some have it
            return None
        return version if isinstance(version, str) else None


def _failed(url: str, error: RefusedError) -> QuantkitError:
    then = "openai(URL, key_env=VARIABLE)" if error.status in (401, 403) else None
    return QuantkitError(f"{url} refuses", why=str(error), next=then)
