"""Calibration text that the model writes itself, where no text is at hand.

A base model begins at its BOS token, as in Self-calibration, https://arxiv.org/abs/2410.17170; a chat model
at a user's turn, and so makes up the question too, as in Magpie, https://arxiv.org/abs/2406.08464. Other
windows begin with a question or some words of ours, so that the text is of many kinds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantkit.formats.finite import all_finite
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Weights
from quantkit.quantization.calibration.finite import NonFiniteError, check_finite_states, first_nonfinite
from quantkit.quantization.memory import WRITTEN
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.text.tokenizer import Tokenizer

_ASKED, _ANSWERED = "QUESTIONOFTHEUSER", "ANSWEROFTHEASSISTANT"
_OUTPUT = "the model's output is NaN or infinite while it writes its calibration text"

_OPENINGS = json.loads((Path(__file__).parent / "passages" / "openings.json").read_text(encoding="utf-8"))
QUESTIONS: list[str] = _OPENINGS["questions"]
"""First user turns of conversations of many kinds, on many topics and in several languages."""
BEGINNINGS: list[str] = _OPENINGS["beginnings"]
"""The first words of plain texts, as different."""
LOGIT_CUTOFF = 20.0
"""Tokens whose logit is this far below the largest are never drawn. Each has a probability below e⁻²⁰."""

Part = tuple[tuple[int, ...], frozenset[int]]


@dataclass(frozen=True)
class WritingPrompt:
    """How a text goes: what is put there for the model, and which tokens end what it writes behind it.

    Attributes:
        first: the part that comes first.
        then: the parts that follow, again and again.
        fallback: why it is plain text although the model has a chat template.
    """

    first: Part
    then: tuple[Part, ...]
    fallback: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WritingPrompt:
        """Of conversations, where the template shows where turns begin and end; else of plain text.

        Raises:
            CalibrationError: the model has neither a chat template nor a BOS or EOS token.
        """
        turns = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
        text, why = "", None
        try:
            if tokenizer.has_chat:
                why = "the chat template doesn't show where turns begin and end"
                text = tokenizer.chat_text(turns, answer=False)
        except SourceError as error:
            why = error.what + (f" ({error.why[:200]})" if error.why else "")
        if text.count(_ASKED) == text.count(_ANSWERED) == 1 and text.index(_ASKED) < text.index(_ANSWERED):
            before, rest = text.split(_ASKED)
            between, after = (tuple(tokenizer.encode(part, special=False)) for part in rest.split(_ANSWERED))
            opening = tuple(tokenizer.encode(before, special=False))
            end_of_question, answered = (tokenizer.eos_ids | frozenset(tokens[:1])
                                         for tokens in (between, after))
            if opening and between and answered:
                return cls((opening, end_of_question),
                           ((between, answered), (after + opening, end_of_question)))
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if begin is None:
            raise CalibrationError("the model can't write a calibration text", next="--calibration builtin",
                                   why="it has neither a chat template nor a BOS or EOS token to begin with")
        part = ((begin,), tokenizer.eos_ids)
        return cls(part, (part,), why and f"the model wrote plain text, not conversations: {why}")

    def openings(self, tokenizer: Tokenizer, count: int) -> list[Part]:
        """How ``count`` windows begin, in turn: as :attr:`first`, with a question where there are
        conversations, and with the first words of some other text."""
        if len(self.then) == 1:
            begin, ends = self.first
            begun = [[self.first], [(begin + tuple(tokenizer.encode(text, special=False)), ends)
                                    for text in BEGINNINGS]]
        else:
            begun = [[self.first], self._questions(tokenizer),
                     [(tuple(tokenizer.encode(text)), tokenizer.eos_ids) for text in BEGINNINGS]]
        begun = [parts for parts in begun if parts]
        kinds = len(begun)
        return [begun[at % kinds][at // kinds % len(begun[at % kinds])] for at in range(count)]

    def _questions(self, tokenizer: Tokenizer) -> list[Part]:
        """Conversations up to the answer; none if the template doesn't take a question alone."""
        try:
            texts = [tokenizer.chat_text([{"role": "user", "content": question}], answer=True)
                     for question in QUESTIONS]
        except SourceError:
            return []
        return [(tuple(tokenizer.encode(text, special=False)), self.then[0][1]) for text in texts]


class _Writer:
    """One window: what it must say next, and what ends its part."""

    def __init__(self, form: WritingPrompt, opening: Part) -> None:
        self._form = form
        # behind a user's turn comes the answer, behind anything else a user's turn
        self._part = -1 if opening == form.first else 0
        self._waiting, self._ends = list(opening[0]), opening[1]

    def next(self, drawn: int) -> int:
        """The next token: one that must be there, or the one that was ``drawn``."""
        if self._waiting:
            return self._waiting.pop(0)
        if drawn in self._ends:
            self._part = (self._part + 1) % len(self._form.then)
            forced, self._ends = self._form.then[self._part]
            self._waiting = list(forced[1:] if forced[:1] == (drawn,) else forced)
        return drawn


@torch.inference_mode()
def write_windows(model: LanguageModel, weights: Weights, tokenizer: Tokenizer, spec: CalibrationSpec,
                  step: Callable[[int], None] = lambda tokens: None) -> torch.Tensor:
    """Sample ``spec.windows`` windows at temperature 1.

    On a CPU whose kernels run the model, the text doesn't depend on the instruction set.

    Args:
        model: the whole model, not quantized.
        weights: the weights of the same model; used to find which tensor isn't finite.
        spec: number and length of windows, seed.
        step: called after every token of a batch of windows, with the tokens written so far.

    Returns:
        int64 ``[windows, tokens]``.

    Raises:
        CalibrationError: nothing says how a text begins.
        NonFiniteError: the model's output isn't finite; window, layer and tensor are named.
    """
    form, known = WritingPrompt.of(tokenizer), min(tokenizer.vocab_size, model.config.vocab_size)
    random = torch.Generator().manual_seed(spec.seed % 2**63)
    tokens = torch.zeros(spec.windows, spec.window, dtype=torch.int64)
    openings = form.openings(tokenizer, spec.windows)
    for first in range(0, spec.windows, WRITTEN):
        part = tokens[first:first + WRITTEN]
        writers = [_Writer(form, opening) for opening in openings[first:first + WRITTEN]]
        cache = KVCache(model.config, dtype=model.dtype, device=model.device)
        numbers = [cache.add(spec.window) for _ in part]
        drawn = [0] * len(part)  # nobody begins with it: something is always put there first
        for at in range(spec.window):
            part[:, at] = torch.tensor([writer.next(token)
                                        for writer, token in zip(writers, drawn, strict=True)])
            if at + 1 < spec.window:
                batch = Batch(cache, numbers, "decode" if at else "prefill")
                logits = model.forward(part[:, at:at + 1].tolist(), batch, [True] * len(part))[:, :known]
                if not bool(torch.isfinite(logits).all()):
                    raise _traced(CausalLM(model.config, weights), part[:, :at + 1], first)
                uniform = torch.rand(len(part), dtype=torch.float64, generator=random)
                drawn = [_draw(row, chance) for row, chance in zip(logits.cpu().numpy(), uniform.tolist())]
            step(first * spec.window + (at + 1) * len(part))
    return tokens


def _draw(logits: np.ndarray, uniform: float) -> int:
    """Draw a token: the first at which the cumulative probability of ``logits [vocab]`` passes ``uniform``.

    Computed in float64. The last bit of an exponential differs between CPUs, and in float64 that almost never
    changes the token."""
    best = float(logits.max())
    likely = np.flatnonzero(logits > best - LOGIT_CUTOFF)
    chances = np.exp(logits[likely].astype(np.float64) - best).cumsum()
    return int(likely[min(np.searchsorted(chances, uniform * chances[-1], "right"), len(likely) - 1)])


def _traced(model: CausalLM, tokens: torch.Tensor, first: int) -> NonFiniteError:
    """Which tensor isn't finite, found by going through windows ``[B, T]`` again; ``first``: the first one's
    number."""
    for sample, window in enumerate(tokens.to(model.device), first):
        x, positions = model.embed(window[None]), torch.arange(len(window), device=model.device)[None]
        try:
            check_finite_states(x, sample, "the hidden state after the embedding")
        except NonFiniteError as error:
            return error
        for index, layer in enumerate(model.layers):
            entered, x = x, layer(x, positions, None)
            if not all_finite(x):
                first_error = first_nonfinite(functools.partial(_run, layer, entered, positions),
                                              layer.linears(), 1, sample, index)
                if first_error is not None:
                    return first_error
        if not all_finite(model.logits(x)):
            return NonFiniteError(_OUTPUT, sample=sample)
    return NonFiniteError(_OUTPUT)


def _run(layer: DecoderLayer, entered: torch.Tensor, positions: torch.Tensor, place: int) -> torch.Tensor:
    return layer(entered[place:place + 1], positions, None)
