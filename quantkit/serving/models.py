"""The models of one server, found by their names."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from quantkit.kv.spec import parse_kv
from quantkit.runtime.engine import Engine
from quantkit.runtime.kv_manager import KVCacheManager
from quantkit.runtime.loader import LoadedModel
from quantkit.serving.errors import ApiError
from quantkit.structure.grammar import CompiledStructure, Compiler, Structure
from quantkit.structure.turns import TurnFormat, turn_format
from quantkit.support.errors import SourceError, UsageError
from quantkit.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class TokenTexts:
    """What single tokens look like, special ones written out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # behind another token, because some decoders drop a text's leading space
        self._before = tokenizer.encode("a", special=False)[-1:]
        self._prefix = len(tokenizer.decode(self._before, skip_special=False))
        self.text = functools.lru_cache(maxsize=2**16)(self._text)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([*self._before, token], skip_special=False)[self._prefix:]

    def bytes(self, token: int) -> list[int] | None:
        """UTF-8 of a token's text; ``None`` if it is a part of a character, and so has no text."""
        text = self.text(token)
        return None if _BROKEN in text else list(text.encode())


SchedulingPolicy = Literal["fcfs", "priority"]
MAX_LISTED = 10
"""Names of models in an error."""


class ServedEngine:
    """One model that is served.

    Args:
        engine: The engine that runs it; the caller starts and closes it.
        loaded: The model's tokenizer, shape and label.
        name: The model's name in requests.
        parse_special: Whether control tokens written out in messages are control tokens.
        scheduling_policy: With ``fcfs`` requests run in their order of arrival; with ``priority`` those with
            a lower ``priority`` go first.
        strict_requests: Whether what a request asks for and the server doesn't do is refused; by default it
            is ignored and named.
        bare_json_calls: Whether a whole message that is a call as plain JSON is one, although the model's
            template writes calls otherwise.

    Attributes:
        texts: The texts of its tokens.
        created: The time at which it was made, in seconds since 1970.
    """

    def __init__(self, engine: Engine, loaded: LoadedModel, name: str, parse_special: bool = False,
                 scheduling_policy: SchedulingPolicy = "fcfs", strict_requests: bool = False,
                 bare_json_calls: bool = True) -> None:
        self.engine = engine
        self.loaded = loaded
        self.name = name
        self.parse_special = parse_special
        self.strict_requests, self.bare_json_calls = strict_requests, bare_json_calls
        self.scheduling_policy: SchedulingPolicy = scheduling_policy
        self.texts, self.created = TokenTexts(loaded.tokenizer), int(time.time())

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together: what the model was made for, and its KV cache has pages
        for."""
        reservation, limit = self.engine.reservation, self.loaded.config.max_position_embeddings
        return limit if reservation is None else min(limit, reservation.tokens)

    @property
    def max_queue(self) -> int:
        """Requests that may wait."""
        return int(self.engine.stats()["max_queue"])

    @functools.cached_property
    def format(self) -> TurnFormat:
        """How it writes tool calls and reasoning."""
        return turn_format(self.loaded.tokenizer)

    @functools.cached_property
    def compiler(self) -> Compiler:
        """Makes constraints of what an answer must look like. UsageError if llguidance isn't installed."""
        return Compiler(self.loaded.tokenizer, self.format, self.loaded.config.vocab_size)

    @property
    def can_chat(self) -> bool:
        """Whether it has a chat template that can be used."""
        try:
            return self.loaded.tokenizer.has_chat
        except SourceError:  # there is a template and it can't be used; a request to chat is told why
            return False

    def prepare(self) -> None:
        """Work out now what the first conversation would otherwise wait for."""
        self.loaded.tokenizer.prepare()

    def compile(self, structure: Structure) -> CompiledStructure:
        """What makes a constraint for each choice.

        Raises:
            ApiError: the structure can't be compiled.
        """
        try:
            return self.compiler.compile(structure)
        except UsageError as error:
            raise ApiError(400, "; ".join(filter(None, (error.what, error.why))),
                           code="invalid_structure") from None

    def kv(self, text: str | None) -> KVCacheManager | None:
        """A request's KV setting, ready for its use.

        Raises:
            ApiError: it can't be read or used.
            EngineFull: too many others are in use.
        """
        if text is None:
            return None
        try:
            return self.engine.prepare(parse_kv(text))
        except UsageError as error:
            raise ApiError(400, f"kv: {error.what}: {error.why}", param="kv", code="invalid_value") from None

    def priority(self, priority: int) -> int:
        """A request's priority.

        Raises:
            ApiError: it isn't 0, and requests run in their order of arrival.
        """
        if priority and self.scheduling_policy != "priority":
            raise ApiError(400, f"priority is {priority}, but requests run in their order of arrival; start "
                                "the server with --scheduling-policy priority, or leave priority out",
                           param="priority", code="unsupported_parameter")
        return priority

    def about(self) -> dict[str, Any]:
        """Its entry in the list of models."""
        loaded = self.loaded
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "quantkit",
                "max_model_len": self.context, "chat": self.can_chat, "method": loaded.label,
                "dtype": str(loaded.dtype).removeprefix("torch."), "kv": str(self.engine.cache.spec)}


class ServedModels:
    """All models of one server.

    Args:
        models: There is at least one, and each has its own name.

    Raises:
        UsageError: none, or two of one name.
    """

    def __init__(self, models: Sequence[ServedEngine]) -> None:
        self._by_name = {model.name: model for model in models}
        if not models or len(self._by_name) < len(models):
            raise UsageError("no model is to be served" if not models else "two models have the same name",
                             why="requests choose a model by its name",
                             next="--name NAME for each model, in their order")

    def __iter__(self) -> Iterator[ServedEngine]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def strict_requests(self) -> bool:
        """Whether what isn't done is refused: by all of them if by one."""
        return any(model.strict_requests for model in self)

    def check_alive(self) -> None:
        """Raises EngineDeadError: an error has ended an engine's thread."""
        for model in self:
            model.engine.check_alive()

    def close(self) -> None:
        """Close the engines; answers that aren't complete are cut.

        Raises:
            Exception: what the first engine that failed raised, once all are closed.
        """
        errors: list[Exception] = []
        for model in self:
            try:
                model.engine.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def names(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._by_name)

    def find(self, name: str | None) -> ServedEngine:
        """The model of that name; without a name the only one, and if it isn't strict, with any name: agents
        ask for the models of the server that they were written for.

        Raises:
            ApiError: there is none, or several and no name.
        """
        if name is None:
            if len(self) == 1:
                return next(iter(self._by_name.values()))
            raise ApiError(400, f"model is missing; this server has {self._listed()}", param="model",
                           code="missing_parameter")
        if len(self) == 1 and not self.strict_requests:
            return next(iter(self))
        return self.named(name)

    def named(self, name: str) -> ServedEngine:
        """The model of just that name. Raises ApiError: there is none."""
        if name not in self._by_name:
            raise ApiError(404, f"no model is called {name[:200]!r}; this server has {self._listed()}",
                           param="model", code="model_not_found")
        return self._by_name[name]

    def _listed(self) -> str:
        names = self.names
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return ", ".join(map(repr, names[:MAX_LISTED])) + more
