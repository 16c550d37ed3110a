"""Calibration text that the model writes itself, where no text is at hand.

A base model begins at its BOS token, as in Self-calibration, https://arxiv.org/abs/2410.17170; a chat model
at a user's turn, and so makes up the question too, as in Magpie, https://arxiv.org/abs/2406.08464. Other
windows begin with a question or some words of ours, so that the text is of many kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quantkit.formats.finite import all_finite
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Weights
from quantkit.quantization.calibration.finite import NonFiniteError, first_nonfinite, require_finite_states
from quantkit.quantization.memory import WRITTEN
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.text.tokenizer import Tokenizer

_ASKED, _ANSWERED = "QUESTIONOFTHEUSER", "ANSWEROFTHEASSISTANT"
_OUTPUT = "the model's output is NaN or infinite while it writes its calibration text"

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
            require_finite_states(x, sample, "the hidden state after the embedding")
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


QUESTIONS = (
    "Write an encyclopedia article about the history of bridges.",
    "Write the first chapter of a novel set in a small harbour town.",
    "What should I know before I adopt a dog?",
    "Write a Python class for a bank account, with docstrings and tests.",
    "Explain how vaccines work to a ten-year-old.",
    "Schreibe einen Artikel über die Geschichte der Stadt Hamburg.",
    "Write a news report about an election in a country that doesn't exist.",
    "How do I find out which process is using a port on Linux?",
    "Raconte une histoire qui se passe dans un train de nuit.",
    "Write a letter of complaint to an airline.",
    "Summarize the causes of the First World War.",
    "Write a C function that reverses a linked list, and explain it line by line.",
    "Give me a recipe for lentil soup, with amounts.",
    "Escribe una carta a un viejo amigo que vive en otro país.",
    "Solve 3x + 7 = 22 step by step, then make up three similar problems with answers.",
    "Write a dialogue between a doctor and a patient who sleeps badly.",
    "Erkläre, wie man unter Linux Dateirechte ändert.",
    "Describe the plot of an opera as a critic would.",
    "Write SQL for a library's database: tables, then five queries.",
    "List the planets of the solar system in a table with their size and distance from the sun.",
    "Write a poem about rain in the city.",
    "Напиши короткий рассказ о зиме.",
    "What are the arguments for and against nuclear power?",
    "Write a manual page for a command-line program that renames files.",
    "Spiega come funziona un motore elettrico.",
    "Write a JSON object that describes a book, its authors and its reviews.",
    "Who was Ada Lovelace?",
    "请介绍一下长城的历史。",
    "Write a JavaScript function that debounces another function.",
    "Plan a three-day trip to Rome.",
    "Write minutes of a meeting about a delayed project.",
    "Explain the difference between a list and a tuple in Python with examples.",
)
"""The first user turn of a conversation."""
BEGINNINGS = (
    "The history of the region begins in the",
    "It was late in the evening when Mr. and Mrs.",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "Die Stadt liegt im Norden von",
    "= The Battle of",
    "NAME\n       ",
    "Abstract. In this paper we",
    "#include <stdio.h>\n\n",
    "The album was released on",
    "\"I do not understand you,\" said",
    "class Parser:\n    \"\"\"",
    "Das Programm liest die Datei",
    "The species is found in",
    "Q: ",
    "LONDON (Reuters) - ",
    "La ville de",
    "Chapter 1\n\n",
    "In mathematics, a",
    "def test_",
    "El río nace en",
    "He was born in",
    "## Installation\n\n",
    "Die Option legt fest, ob",
    "Dear Sir or Madam,\n\n",
    "The film stars",
    "<!DOCTYPE html>\n<html>\n",
    "On the other hand,",
    "Il libro racconta",
    "1. Preheat the oven to",
    "The company was founded in",
    "SELECT ",
    "В начале",
)
"""The first words of plain text."""
