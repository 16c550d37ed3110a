"""Compiles a grammar in a process of its own first, and walks a little way through it.

llguidance bounds what most grammars cost, but not all: a schema of some multiples of large numbers keeps it
busy for minutes, and a chain of thousands of rules overflows its stack, which would end the server. So
``quantkit.support.isolation`` runs :func:`trial` under limits; what passes is compiled again where it is
used. The trial's vocabulary is the 256 bytes and the model's special tokens: only the size of the vocabulary,
which no request chooses, makes a difference between the two.
"""

from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from quantkit.structure.schemas import Path, at, children, pointer, rebased, resolved, without

STEPS = 48
"""Tokens of the walk."""
MAX_STEP_SECONDS = 0.1
"""Of processor time for one token of the walk."""
MAX_FAULTS = 32
"""That are taken out of one schema."""
_STACK = 2**20
"""Bytes; threads of a server have several times as much."""


def limits() -> llguidance.LLParserLimits:
    """llguidance's own limits, a fraction of its defaults, so that a mask takes some milliseconds."""
    return llguidance.LLParserLimits(
        max_items_in_row=1000, initial_lexer_fuel=500_000, step_lexer_fuel=50_000, step_max_items=10_000,
        max_lexer_states=25_000, max_grammar_size=100_000, verbose_errors=False)


def trial(lark: str | None, given: str | None, vocab_size: int, special: dict[str, int],
          eos: int) -> dict[str, str]:
    """Whether a grammar can be used.

    Args:
        lark: a grammar, in which ``@given`` is the one that is given; ``None``: that one alone.
        given: a stranger's, in Lark's notation as llguidance has it, or in EBNF (GBNF) with ``::=``.
        vocab_size: ids of the model.
        special: ids of its special tokens.
        eos: the id that ends a text.

    Returns:
        ``{"grammar": text}``: what to compile; or ``{"error": reason}``.
    """
    outcome: dict[str, str] = {}

    def run() -> None:
        try:
            outcome.update(_trial(lark, given, vocab_size, tuple(sorted(special.items())), eos))
        except BaseException as error:  # panics of the library are no Exceptions
            outcome["error"] = f"{type(error).__name__}: {error}"

    _on_small_stack(run)
    return outcome


def widen(schema: dict[str, Any]) -> dict[str, Any]:
    """Take out of a schema what llguidance refuses, until it accepts the rest.

    Returns:
        ``schema``: what it accepts, or what was left after :data:`MAX_FAULTS`; ``faults``: paths that were
        taken out, each with llguidance's reason.
    """
    outcome: dict[str, Any] = {"schema": schema, "faults": []}

    def run() -> None:
        while len(outcome["faults"]) < MAX_FAULTS and (fault := _fault(outcome["schema"])) is not None:
            outcome["schema"] = without(outcome["schema"], fault[0])
            outcome["faults"].append(fault)

    _on_small_stack(run)
    return outcome


def _on_small_stack(work: Callable[[], None]) -> None:
    """Deep recursion overflows a small stack, and ends this process, long before it would a server's."""
    threading.stack_size(_STACK)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _fault(root: Any) -> tuple[Path, str] | None:
    """Where in a schema stands what llguidance refuses, and what it says."""
    tokenizer, _ = _tokenizer(256, (), 256)
    moved = rebased(root, "#/root")

    def refusal(path: Path, left_out: Path | None = None) -> str:
        document = moved if path else root
        document = document if left_out is None else without(document, left_out)
        schema = {"root": document, "$ref": f"#/root{pointer(path)}"} if path else document
        try:
            matcher = llguidance.LLMatcher(tokenizer, f"start: %json {json.dumps(schema)}", log_level=0,
                                           limits=limits())
        except BaseException as error:  # panics of the library are no Exceptions
            return f"{type(error).__name__}: {error}"
        return str(matcher.get_error()) if matcher.is_error() else ""

    path: Path = ()
    if not (reason := refusal(path)):
        return None
    seen: set[Path] = set()
    while path not in seen:  # down to the smallest schema that is refused by itself
        seen.add(path)
        node = at(root, path)
        inside = [path + place for place, part in children(node) if isinstance(part, dict)]
        if (target := resolved(root, node.get("$ref"))) is not None:
            inside.append(target)
        for place in inside:
            if place not in seen and (inner := refusal(place)):
                path, reason = place, inner
                break
    for key in at(root, path):
        place = (*path, key)
        alone = key == "patternProperties" or not isinstance(at(root, place), dict)
        if alone and not refusal(path, place):
            return place, reason
    return path, reason


def _trial(lark: str | None, given: str | None, vocab_size: int, special: tuple[tuple[str, int], ...],
           eos: int) -> dict[str, str]:
    if given is not None and "::=" in given:
        given = str(any_to_lark(given))
    grammar = lark or given or ""
    if lark is not None and given is not None:
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "given", "lark_grammar": given}]})
    tokenizer, meaningful = _tokenizer(vocab_size, special, eos)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    chance = random.Random(0)
    for _ in range(STEPS):
        if matcher.is_error():
            return {"error": matcher.get_error()}
        if matcher.is_stopped():
            break
        begin = time.thread_time()
        bits = matcher.compute_bitmask()
        allowed = [token for token in meaningful if bits[token >> 3] >> (token & 7) & 1]
        if matcher.is_error():
            return {"error": matcher.get_error()}
        if not allowed:
            return {"error": "it allows no text at all"}
        matcher.consume_token(chance.choice(allowed))
        if time.thread_time() - begin > MAX_STEP_SECONDS:
            return {"error": "each token of an answer would take too much work"}
    return {"grammar": grammar}


@functools.lru_cache(4)
def _tokenizer(vocab_size: int, special: tuple[tuple[str, int], ...],
               eos: int) -> tuple[llguidance.LLTokenizer, list[int]]:
    """The vocabulary, and its ids that mean something."""
    vocabulary = _Bytes(vocab_size, dict(special), eos)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary)), vocabulary.meaningful


class _Bytes:
    """A vocabulary of bytes, with special tokens at the model's own ids; the rest of the ids mean nothing."""

    def __init__(self, vocab_size: int, special: dict[str, int], eos: int) -> None:
        names = {eos: b"</end>"} | {number: text.encode("utf-8", "replace")
                                   for text, number in special.items()}
        size = max(vocab_size, 256 + len(names), *names) + 1
        free = iter(range(256))
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens: list[bytes] = []
        self._ids: dict[int, int] = {}
        for number in range(size):
            byte = None if number in names else next(free, None)
            if byte is not None:
                self._ids[byte] = number
            self.tokens.append(b"\xff" + names.get(number, b"[%d]" % number) if byte is None
                               else bytes((byte,)))
        self.meaningful = sorted({*names, *self._ids.values()})
        self.special_token_ids = sorted(set(range(size)) - set(self._ids.values()))

    def __call__(self, text: Any) -> list[int]:
        return [self._ids[byte] for byte in (text if isinstance(text, bytes) else text.encode())]


