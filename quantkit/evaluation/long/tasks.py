"""The tasks on long contexts: passkeys, needles, needles among needles, chains of variables.

After the passkey of https://arxiv.org/abs/2305.16300, the needle in a haystack, and RULER,
https://arxiv.org/abs/2404.06654 (its multi-key needles and variable tracking), in words of our own. Every
question is asked so that a model which merely continues a text can answer it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quantkit.support.errors import UsageError

KEYS = 4
"""Needles of different keys that a context of ``multikey`` has at least."""
CHAINS, HOPS = 4, 2
"""Chains of variables in a context, and how often a value is passed on in each. A model that names any code
of the text is right once in four: well below what counts as solved."""
_PLACES = (
    "Oslo", "Lima", "Cairo", "Dublin", "Havana", "Lisbon", "Nairobi", "Quito", "Riga", "Seoul", "Tunis",
    "Vienna", "Warsaw", "Zagreb", "Athens", "Berlin", "Dakar", "Geneva", "Hanoi", "Jakarta", "Kyiv", "London",
    "Madrid", "Ottawa", "Paris", "Rome", "Sofia", "Tokyo")
_THINGS = (
    "violin", "candle", "garden", "rocket", "pepper", "anchor", "basket", "camera", "dragon", "feather",
    "guitar", "hammer", "island", "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pillow",
    "rabbit", "saddle", "temple", "umbrella", "window")
_NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Leon",
    "Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tina", "Victor")
_CODES = "Read the text and remember the access codes in it."


@dataclass(frozen=True)
class QuestionText:
    """A question.

    Attributes:
        ask: the question itself, for models that are asked as chat.
        lead: the beginning of its answer: a text that a model continues.
        answer: the text that follows the lead, without the space between them.
        depth: the place of its answer in the hay, 0 to 1; ``None`` if it is in several places.
        hops: through how many other variables the answer is reached; 0 for a needle.
    """

    ask: str
    lead: str
    answer: str
    depth: float | None
    hops: int = 0


@dataclass(frozen=True)
class ContextDraft:
    """A context before it has a length.

    Attributes:
        intro: says what to look for.
        hidden: depth (0 to 1) and sentence, in rising order.
        questions: all questions about this one context.
    """

    intro: str
    hidden: tuple[tuple[float, str], ...]
    questions: tuple[QuestionText, ...]


@dataclass(frozen=True)
class LongTask:
    """A kind of question.

    Attributes:
        name: its name in ``--tasks``.
        drafts: depths, chance → the contexts of one sample.
        filler: its hay is always generated.
    """

    name: str
    drafts: Callable[[Sequence[float], random.Random], Iterator[ContextDraft]]
    filler: bool = False


def _passkey(depths: Sequence[float], chance: random.Random) -> Iterator[ContextDraft]:
    """One number, said twice, in a context of its own for each depth."""
    for depth in depths:
        code = _number(chance)
        yield ContextDraft("Somewhere in the text below stands an access code. Remember it.",
                           ((depth, f"The access code is {code}. Remember it: {code} is the access code."),),
                           (QuestionText("What is the access code?", "The access code is", code, depth),))


def _needle(depths: Sequence[float], chance: random.Random) -> Iterator[ContextDraft]:
    """Three words for one name, said once, in a context of its own for each depth.

    Not one: an answer's first word comes out of the prompt, before any policy has acted.
    """
    for depth in depths:
        name, words = chance.choice(_NAMES), " ".join(chance.sample(_THINGS, 3))
        yield ContextDraft("Read the text and remember the secret words in it.",
                           ((depth, f"The secret words of {name} are {words}."),),
                           (QuestionText(f"What are the secret words of {name}?",
                                         f"The secret words of {name} are", words, depth),))


def _multikey(depths: Sequence[float], chance: random.Random) -> Iterator[ContextDraft]:
    """A number for a place at every depth, all in one context: each is asked for, the others distract."""
    more = [chance.random() for _ in range(KEYS - len(depths))]
    places = chance.sample(_PLACES, len(depths) + len(more)) if len(depths) <= len(_PLACES) else []
    if not places:
        raise UsageError(f"{len(depths)} depths for multikey", why=f"{len(_PLACES)} at most")
    codes = _numbers(chance, len(places))
    hidden = [(depth, f"The access code for {place} is {code}.")
              for depth, place, code in zip([*depths, *more], places, codes, strict=True)]
    questions = [QuestionText(f"What is the access code for {place}?", f"The access code for {place} is",
                              code, depth)
                 for depth, place, code in zip(depths, places, codes)]
    yield ContextDraft(_CODES, tuple(sorted(hidden)), tuple(questions))


def _variables(depths: Sequence[float], chance: random.Random) -> Iterator[ContextDraft]:
    """Chains of names in one context: the first has a number, each other has what the one before has."""
    names = chance.sample(_NAMES, CHAINS * (HOPS + 1))
    chains = [names[start:start + HOPS + 1] for start in range(0, len(names), HOPS + 1)]
    codes = _numbers(chance, CHAINS)
    # a value is passed on only after it was given; between the chains order is left to chance
    order = [index for index in range(CHAINS) for _ in range(HOPS + 1)]
    chance.shuffle(order)
    steps = [0] * CHAINS
    hidden = []
    for depth, index in zip(sorted(chance.random() for _ in order), order, strict=True):
        step, chain = steps[index], chains[index]
        steps[index] += 1
        hidden.append((depth, f"The access code for {chain[0]} is {codes[index]}." if step == 0 else
                       f"{chain[step]} has the same access code as {chain[step - 1]}."))
    questions = [QuestionText(f"What is the access code for {name}?", f"The access code for {name} is", code,
                              None, hops)
                 for chain, code in zip(chains, codes) for hops, name in enumerate(chain)]
    yield ContextDraft(_CODES, tuple(hidden), tuple(questions))


def _number(chance: random.Random) -> str:
    return str(chance.randrange(10_000, 100_000))


def _numbers(chance: random.Random, count: int) -> list[str]:
    return [str(number) for number in chance.sample(range(10_000, 100_000), count)]


TASKS = {task.name: task for task in (LongTask("passkey", _passkey, filler=True), LongTask("needle", _needle),
                                      LongTask("multikey", _multikey), LongTask("variables", _variables))}
