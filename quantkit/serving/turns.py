"""The next turn of a conversation: the engine's jobs for it, and what their tokens mean.

A :class:`NextTurn` stands between all APIs that chat and the engine. It renders and encodes the conversation
and parses each choice's tokens into deltas: text, reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from quantkit.runtime.core import Completion, TokenInfo
from quantkit.serving.conversation import Conversation, choice_sampling, thinking_options
from quantkit.serving.errors import ApiError
from quantkit.serving.ignored import IGNORED
from quantkit.serving.models import ServedEngine
from quantkit.serving.work import ChoiceJob, PromptReader, RequestWork, check_fits, check_size
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta
from quantkit.structure.conversation import conversation as prepare
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import opens_reasoning, parser

TurnReason = Literal["stop", "stop_string", "length", "tool_calls"]
_TAIL = 32
"""Tokens at a prompt's end among which a template may open the reasoning."""


@dataclass(frozen=True)
class TurnEnd:
    """Why and how a choice ended.

    Attributes:
        reason: This is ``tool_calls`` if it has some and wasn't cut; otherwise as in :class:`Completion`.
        stop: The stop string that ended it.
        tokens: The number of tokens that were generated.
        reasoning_tokens: The number of them up to the reasoning's end.
        cached_tokens: The number of the prompt's tokens that the prefix cache had.
        accepted_tokens, rejected_tokens: The numbers of tokens that were drafted and right, and in vain.
    """

    reason: TurnReason
    stop: str | None
    tokens: int
    reasoning_tokens: int
    cached_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True)
class TurnEvent:
    """What became known of one choice: deltas, with the token that brought them, or its end."""

    choice: int
    deltas: Sequence[TurnDelta]
    token: TokenInfo | None = None
    end: TurnEnd | None = None


@dataclass(frozen=True)
class TurnUsage:
    """Tokens of a request; a prompt counts once, however many choices it has.

    Of the prompt, ``cached`` is what the prefix cache had before the first choice read it. Of the completion,
    ``accepted`` tokens were drafted; ``rejected`` ones were drafted in vain and are no part of it.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int
    accepted: int = 0
    rejected: int = 0


@dataclass
class TurnCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""


TurnPart = TextDelta | ReasoningDelta | TurnCall


def begins_part(delta: TurnDelta, part: TurnPart | None) -> bool:
    """Whether a delta begins another part than the one before it."""
    return delta.id is not None if isinstance(delta, ToolCallDelta) else type(part) is not type(delta)


def empty_part(delta: TurnDelta) -> TurnPart:
    """The part that a delta begins, without its content."""
    return TurnCall(delta.id or "", delta.name or "") if isinstance(delta, ToolCallDelta) else type(delta)("")


@dataclass
class Turn:
    """A whole choice.

    Attributes:
        parts: The texts, reasoning and calls in the order in which they came; neighbors of a kind are one.
        tokens: The tokens that it consists of.
        end: Why and how it ended, once it has.
    """

    parts: list[TurnPart] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    end: TurnEnd | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def calls(self) -> list[TurnCall]:
        return [part for part in self.parts if isinstance(part, TurnCall)]

    def add(self, event: TurnEvent) -> None:
        for delta in event.deltas:
            last = self.parts[-1] if self.parts else None
            if begins_part(delta, last):
                last = empty_part(delta)
                self.parts.append(last)
            if isinstance(delta, ToolCallDelta):
                self.calls[delta.index].arguments += delta.arguments
            elif not isinstance(last, TurnCall | None):
                self.parts[-1] = type(delta)(last.text + delta.text)
        if event.token is not None:
            self.tokens.append(event.token)
        self.end = event.end or self.end


class NextTurn:
    """The choices for one conversation's next turn.

    Args:
        model: The model that answers.
        conversation: The conversation that is to go on.

    Attributes:
        prompt: The token ids of the prompt.
        jobs: A job for each choice, without a constraint.
        structure: The structure that each choice must have; it isn't compiled.

    Raises:
        ApiError: the model can't chat, or the conversation is too long.
        ContextLengthError: prompt and answer don't fit.
        QuantkitError: the template or the tokenizer is at fault.
    """

    def __init__(self, model: ServedEngine, conversation: Conversation) -> None:
        self._model, self._conversation = model, conversation
        priority = model.priority(conversation.priority)
        check_size(conversation.n, model.max_queue)
        self.prompt = render(model, conversation)
        tail = model.loaded.tokenizer.decode(self.prompt[-_TAIL:], skip_special=False)
        self._in_reasoning = opens_reasoning(model.format, tail)
        self.structure = self.structure_of_turn(conversation.structure)
        limit = output_limit(conversation.max_tokens, model.context - len(self.prompt),
                             conversation.limit_param)
        kv, special = model.kv(conversation.kv), model.format.special
        self.jobs = [ChoiceJob(self.prompt, choice_sampling(conversation.sampling, limit, i),
                               conversation.logprobs, keep_special=special, kv=kv, priority=priority,
                               cache_salt=conversation.cache_salt)
                     for i in range(conversation.n)]
        check_fits(model.loaded, self.jobs)

    def structure_of_turn(self, structure: Structure | None) -> Structure | None:
        """What a whole turn must look like, if this is what is asked of its answer."""
        return None if structure is None else replace(
            structure, parallel_tool_calls=self._conversation.parallel_calls, reasoning=True,
            prompt_opens_reasoning=self._in_reasoning)

    async def events(self, work: RequestWork) -> AsyncIterator[TurnEvent]:
        """What becomes known of all choices, as it does; each choice's end is its last event.

        Raises:
            BaseException: what went wrong in the engine.
        """
        choices = [_Choice(self, number, work) for number in range(len(self.jobs))]
        async for event in work.events():
            choice = choices[event.choice]
            if event.token is not None:
                yield TurnEvent(event.choice, choice.push(event.token.text), event.token)
            if event.done is not None:
                yield TurnEvent(event.choice, choice.finish(event.done.text))
                yield TurnEvent(event.choice, (), end=choice.end(event.done))

    async def whole(self, work: RequestWork) -> list[Turn]:
        """All choices, when everything is there. Raises what :meth:`events` does."""
        turns = [Turn() for _ in self.jobs]
        async for event in self.events(work):
            turns[event.choice].add(event)
        return turns

    def usage(self, ends: Iterable[TurnEnd | None]) -> TurnUsage:
        """What choices with these ends took."""
        known = [end for end in ends if end is not None]
        return TurnUsage(len(self.prompt), sum(end.tokens for end in known),
                         min((end.cached_tokens for end in known), default=0),
                         sum(end.reasoning_tokens for end in known),
                         sum(end.accepted_tokens for end in known), sum(end.rejected_tokens for end in known))


class _Choice:
    """What one choice's tokens mean."""

    def __init__(self, turns: NextTurn, number: int, work: RequestWork) -> None:
        self._number = number
        self._work = work
        self._conversation = turns._conversation
        structure = turns._conversation.structure
        # JSON that was asked for is an answer
        bare = turns._model.bare_json_calls and not (structure is not None and structure.describes_text)
        self._parser = parser(turns._model.format, turns._conversation.tools, turns._in_reasoning, bare)
        self._characters = self._tokens = self._reasoning = 0
        self._called = self._closed = False

    def push(self, text: str) -> Sequence[TurnDelta]:
        """More text, of one token."""
        self._tokens += 1
        self._characters += len(text)
        return self._kept(self._parser.push(text) if text else [])

    def finish(self, text: str) -> Sequence[TurnDelta]:
        """The end of the whole ``text``."""
        rest = text[self._characters:]
        return self._kept([*(self._parser.push(rest) if rest else []), *self._parser.finish()])

    def end(self, done: Completion) -> TurnEnd:
        """How it ended."""
        reason: TurnReason = "stop" if done.finish_reason == "cancelled" else done.finish_reason
        if self._called and reason == "stop":
            reason = "tool_calls"
        return TurnEnd(reason, done.stop_string if reason == "stop_string" else None, len(done.token_ids),
                       self._reasoning, done.cached_tokens, *done.predicted)

    def _kept(self, deltas: list[TurnDelta]) -> list[TurnDelta]:
        kept: list[TurnDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._called = True
                if delta.index and not self._conversation.parallel_calls and not self._closed:
                    self._closed = True
                    self._work.stop(self._number)
            if not self._closed:
                kept.append(delta)
            if isinstance(delta, ReasoningDelta):
                self._reasoning = self._tokens
        return kept


def output_limit(asked: int | None, room: int, param: str) -> int:
    """How many tokens an answer may have.

    Args:
        asked: The number that the request asks for; ``None``: as many as fit.
        room: The tokens of the context behind the prompt. A prompt that leaves none asks for one token, and
            is refused with the numbers.
        param: The parameter that asks. If it asks for more than there is room for, it is cut and named; a
            strict server refuses the request later, with the numbers.
    """
    room = max(room, 1)
    if asked is None:
        return room
    if asked > room and not (ignored := IGNORED.get()).strict:
        ignored.other(f"{param} (cut to {room})")
        return room
    return asked


def render(model: ServedEngine, conversation: Conversation) -> list[int]:
    """Token ids of a conversation, ready for its next turn.

    Raises:
        ApiError: the model can't chat, or the conversation is far too long.
        QuantkitError: the template or the tokenizer refuses it, or fails.
    """
    tokenizer = model.loaded.tokenizer
    if not tokenizer.has_chat:
        raise ApiError(400, f"{model.name} has no chat template, so it can't chat; use /v1/completions",
                       param=conversation.param, code="no_chat_template")
    reader = PromptReader(tokenizer, model.context, conversation.max_tokens or 1, conversation.param)
    messages, tools = prepare(model.format, conversation.messages, conversation.tools)
    options = dict(conversation.template_options)
    if conversation.thinking:
        options = thinking_options(tokenizer.template_text, model.format.reasoning is not None,
                                   conversation.thinking) | options
    return tokenizer.chat(messages, reader.check, parse_special=model.parse_special, tools=tools,
                          options=options)
