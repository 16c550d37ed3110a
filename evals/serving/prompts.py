"""Prompts of mixed lengths from the project's own documents, the same for every server of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
TASKS = ("Summarize this text in a few sentences.", "Explain this text to a beginner.",
         "List the most important points of this text.", "What would you ask the author of this text?")
SHORT = ("What is the capital of France?", "Write a haiku about rain.", "Explain photosynthesis.",
         "List five prime numbers.", "Who was Ada Lovelace?", "How does a bicycle work?",
         "Translate 'good morning' into German.", "Give me three names for a cat.")
LENGTHS = ((0.35, 0, 0), (0.40, 300, 1500), (0.25, 2000, 5000))
"""Share of requests and the least and the most characters of text in them; about 4 characters are a token."""


@dataclass(frozen=True)
class PromptRequest:
    """One user's message and how many tokens the answer has."""

    message: str
    max_tokens: int


@cache
def words() -> tuple[str, ...]:
    """All words of the documents' prose, in order: tables and code have more tokens a character."""
    return tuple(word for path in sorted(DOCS.glob("*.md")) if path.name != "cli.md"
                 for line in path.read_text(encoding="utf-8").splitlines()
                 if not line.startswith(("|", "    ", "#", "`")) for word in line.split())


def text(random_: random.Random, characters: int) -> str:
    """A stretch of the documents of about this length, at a place that is drawn."""
    source = words()
    place = random_.randrange(len(source))
    taken = []
    length = 0
    while length < characters:
        taken.append(source[place % len(source)])
        length += len(taken[-1]) + 1
        place += 1
    return " ".join(taken)


def requests(seed: str, count: int, least: int = 32, longest: int = 160) -> list[PromptRequest]:
    """A list that depends on the seed alone.

    Each message begins with words of its own, so that no server can take it from a cache by accident. The
    three kinds of :data:`LENGTHS` are mixed in exact shares, in an order that is drawn.
    """
    random_ = random.Random(seed)
    made = []
    for index in range(count):
        share, bounds = (index + 0.5) / count, LENGTHS[-1]
        for bounds in LENGTHS:
            share -= bounds[0]
            if share < 0:
                break
        salt = f"{random_.choice(words())} {random_.randrange(10**6)}."
        body = text(random_, random_.randint(bounds[1], bounds[2])) if bounds[2] else ""
        message = f"{salt} {random_.choice(TASKS)}\n\n{body}" if body else f"{salt} {random_.choice(SHORT)}"
        made.append(PromptRequest(message, random_.randint(least, longest)))
    random_.shuffle(made)
    return made
