"""Turns drafts into token ids of exactly the requested length."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.long.haystack import FillerHaystack, Haystack, fill_haystack
from quantkit.evaluation.long.tasks import TASKS, ContextDraft, QuestionText
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

MARK = "\u2402here the text stands\u2403"
"""Where a chat template is cut in two."""


@dataclass(frozen=True)
class Question:
    """One question about a context, in tokens.

    Attributes:
        ids: follow the context, up to where the answer begins.
        answer: the ids of the right answer.
        text: the right answer.
        depth, hops: see :class:`~quantkit.evaluation.long.tasks.QuestionText`.
    """

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    text: str
    depth: float | None
    hops: int


@dataclass(frozen=True)
class LongItem:
    """A context and its questions.

    Attributes:
        task: the name of the task.
        length: tokens of the context with the longest question and answer, exactly.
        sample: its number among those of the same task and length.
        context: the context's token ids.
        questions: at least one.
    """

    task: str
    length: int
    sample: int
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class PromptFrame:
    """What stands around a text, by the model's chat template if it has one.

    Attributes:
        before: ids before it.
        between: the text that ends the user's turn and begins the answer; ``None``: the turn isn't ended, the
            text is simply continued, which the smallest models are best at.
    """

    before: tuple[int, ...]
    between: str | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat: bool) -> PromptFrame:
        """The frame of a model: within a user's turn, where it has a chat template.

        Raises:
            SourceError: ``chat``, and the model has no chat template.
            UsageError: ``chat``, and its template changes what a user says.
        """
        if not chat and not tokenizer.has_chat:
            return cls(tuple(tokenizer.encode("", special=True)), None)
        parts = tokenizer.chat_text([{"role": "user", "content": MARK}]).split(MARK)
        if chat and len(parts) != 2:
            raise UsageError("the model's chat template doesn't keep a message as it is",
                             why=f"it has the user's text {len(parts) - 1} times", next="leave out --chat")
        return cls(tuple(tokenizer.encode(parts[0], special=False)), parts[1] if chat else None)


def depths_of(count: int) -> tuple[float, ...]:
    """``count`` places from the beginning to the end, evenly spaced; a single one is the middle."""
    return tuple(index / (count - 1) for index in range(count)) if count > 1 else (0.5,)


def make_items(tokenizer: Tokenizer, task: str, hay: Haystack, *, length: int, depths: int, samples: int,
               seed: int = 0, chat: bool = False) -> list[LongItem]:
    """The contexts of one task at one length.

    Args:
        tokenizer: the model's: lengths are in its tokens.
        task: one of :data:`~quantkit.evaluation.long.tasks.TASKS`.
        hay: the text in which things are hidden, unless the task generates its own.
        length: tokens of a context with the longest question and answer.
        depths: places, see :func:`depths_of`.
        samples: how often everything is drawn, each time with other names, numbers and text.
        seed: the seed of all draws; the same one gives the same items.
        chat: ask by the model's chat template.

    Raises:
        UsageError: the length is too short for what is hidden, or the text for the length.
        SourceError: the model has no chat template to ask by.
    """
    frame, items = PromptFrame.of(tokenizer, chat), []
    for sample in range(samples):
        # what is drawn at one length doesn't depend on which others are asked for
        chance = random.Random(f"{seed} {task} {length} {sample}")
        for draft in TASKS[task].drafts(depths_of(depths), chance):
            source = FillerHaystack() if TASKS[task].filler else hay
            items.append(_item(tokenizer, frame, draft, source, (task, length, sample), chance))
    return items


def _item(tokenizer: Tokenizer, frame: PromptFrame, draft: ContextDraft, hay: Haystack,
          key: tuple[str, int, int], chance: random.Random) -> LongItem:
    task, length, sample = key
    # what a user says is text: a control token written out in it is none
    intro = tokenizer.encode(f"{draft.intro}\n\n", special=False, parse_special=False)
    questions = tuple(_question(tokenizer, frame, question) for question in draft.questions)
    hidden = [(depth, tokenizer.encode(f" {text}", special=False, parse_special=False))
              for depth, text in draft.hidden]
    fixed = len(frame.before) + len(intro) + sum(len(ids) for _, ids in hidden)
    fixed += max(len(question.ids) + len(question.answer) for question in questions)
    if fixed >= length:
        raise UsageError(f"{length} tokens are too few for {task}", next=f"--context {2 * fixed}",
                         why=f"what is hidden and asked takes {fixed}")
    straw = fill_haystack(hay, tokenizer, length - fixed, chance)
    context = [*frame.before, *intro]
    done = 0
    for depth, ids in hidden:
        place = _nearest(straw.starts, depth * len(straw.ids))
        context += (*straw.ids[done:place], *ids)
        done = place
    context += straw.ids[done:]
    return LongItem(task, length, sample, tuple(context), questions)


def _nearest(starts: Sequence[int], place: float) -> int:
    """The sentence that begins nearest to a place."""
    right = bisect_left(starts, place)
    return min(starts[max(0, right - 1):right + 1], key=lambda start: abs(start - place))


def _question(tokenizer: Tokenizer, frame: PromptFrame, question: QuestionText) -> Question:
    lead = question.lead if frame.between is None else f"{question.ask}{frame.between}{question.lead}"
    text = f"\n\n{lead}"
    ids, with_answer = (tokenizer.encode(part, special=False) for part in (text, f"{text} {question.answer}"))
    # some tokenizers write a text's first space otherwise than one within it
    answer = with_answer[len(ids):] if with_answer[:len(ids)] == ids else tokenizer.encode(
        f" {question.answer}", special=False)
    return Question(tuple(ids), tuple(answer), question.answer, question.depth, question.hops)
