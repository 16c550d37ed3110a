"""What drafts gain: decoding with and without, on texts of different kinds, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.speed.results import Spread
from quantkit.kv.spec import KVSpec
from quantkit.quantization.calibration.builtin_text import passage
from quantkit.runtime.core import Request
from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent

NONE = "none"


@dataclass(frozen=True)
class DraftSettings:
    """What is measured.

    Attributes:
        drafters: the drafters, as ``--draft`` takes them.
        tokens: the tokens of each answer.
        repeats: timed runs of each.
        temperature: 0 is greedy.
        kv: the KV setting; ``None``: the model's own.
    """

    drafters: Sequence[str]
    tokens: int = 200
    repeats: int = 5
    temperature: float = 0.0
    kv: KVSpec | None = None


def tasks() -> dict[str, str]:
    """What is asked, by the kind of text: a question, an edit of code, a summary."""
    code, text = passage("code_python"), passage("encyclopedia")[:3000]
    function = code[code.index("def read_rows"):code.index("def average")].strip()
    return {"chat": "What should I know before I plant a vegetable garden for the first time? Give me some "
                    "advice.",
            "edit": "Rename the variable count to number_of_rows in this Python code, and return all of the "
                    f"code with no other change:\n\n```python\n{function}\n```",
            "summary": f"Summarize this text in a few sentences:\n\n{text}"}


def bench_drafts(loaded: LoadedModel, settings: DraftSettings, progress: Listener = silent,
                 keep: Callable[[dict[str, Any]], None] = lambda report: None) -> dict[str, Any]:
    """Decode each task without drafts and with each drafter, in turns, and compare the tokens.

    Args:
        loaded: the model; drafters start anew for each task.
        settings: the choice of measurements.
        progress: told of every run.
        keep: given what is known so far after every task.

    Returns:
        ``machine``, ``model``, ``label``, and ``cases``: ``task``, ``drafter``, ``tok_s`` and ``gain`` (to
        decoding without drafts in the same turn; medians with their range), ``tokens_a_step``, ``drafted``
        and ``accepted`` tokens of an answer.

    Raises:
        UsageError: a drafter can't be used, or the model gets no drafts.
        QuantkitError: tokens differ, which they never may.
    """
    names = [NONE, *settings.drafters]
    report: dict[str, Any] = {"machine": machine(loaded.model.device), "model": loaded.uri,
                              "label": loaded.label, "kv": str(settings.kv or loaded.kv),
                              "temperature": settings.temperature, "tokens": settings.tokens, "cases": []}
    kinds = tasks()
    total, done = len(kinds) * (1 + settings.repeats) * len(names), 0
    for task, text in kinds.items():
        runs = {name: _Runs(loaded, name, settings) for name in names}
        for turn in range(1 + settings.repeats):
            for name, each in runs.items():
                each.run(_prompt(loaded, text), timed=turn > 0)
                done += 1
                progress(ProgressEvent(done, total, f"{task}, {name}"))
        for name, each in runs.items():
            if each.token_ids != runs[NONE].token_ids:
                raise QuantkitError(f"{name} changes what is generated", why="drafts never may",
                                    next="report it with the model and this command")
            report["cases"].append({"task": task, "drafter": name} | each.summary(runs[NONE]))
        keep(report)
    return report


def _prompt(loaded: LoadedModel, text: str) -> list[int]:
    if loaded.tokenizer.has_chat:
        return loaded.tokenizer.chat([{"role": "user", "content": text}])
    return loaded.tokenizer.encode(text)


class _Runs:
    """One drafter's runs of one task.

    Attributes:
        speeds: tokens a second of each run.
        token_ids: the tokens that were generated.
    """

    def __init__(self, loaded: LoadedModel, name: str, settings: DraftSettings) -> None:
        self._settings, drafter = settings, parse_drafter(name)
        self._engine = Engine(loaded, kv=settings.kv, max_batch=1, drafter=drafter)
        if drafter is not None and self._engine.speculator is None:
            raise UsageError(f"{loaded.uri} gets no drafts", next="see docs/drafts.md",
                             why="a token's bits may depend on what goes through this model beside it")
        self.speeds: list[float] = []
        self.token_ids: list[int] = []
        self._steps = self._drafted = self._accepted = 0

    def run(self, prompt: list[int], timed: bool) -> None:
        """Generate the answer; the first token comes of the prompt and isn't timed."""
        settings, engine = self._settings, self._engine
        request: Request = engine.submit(prompt, Sampling(
            max_tokens=settings.tokens, ignore_eos=True, temperature=settings.temperature, seed=0))
        while not request.result.token_ids:
            engine.step()
        begin, steps = time.perf_counter(), engine.stats()["steps"]
        while engine.step():
            pass
        if timed:
            self.speeds.append((settings.tokens - 1) / (time.perf_counter() - begin))
        self._steps = engine.stats()["steps"] - steps
        self.token_ids = request.result.token_ids
        self._drafted, self._accepted = request.result.drafted_tokens, request.result.accepted_tokens

    def summary(self, plain: _Runs) -> dict[str, Any]:
        gains = [ours / theirs for ours, theirs in zip(self.speeds, plain.speeds, strict=True)]
        return {"tok_s": Spread.of(self.speeds).model_dump(), "gain": Spread.of(gains).model_dump(),
                "tokens_a_step": (self._settings.tokens - 1) / self._steps, "drafted": self._drafted,
                "accepted": self._accepted}


def lines(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table: task, drafter, tokens a second, gain with its range, tokens a step, drafts."""
    return [(case["task"], case["drafter"], f"{case['tok_s']['median']:.1f}",
             "" if case["drafter"] == NONE else "{median:.2f} ({low:.2f}–{high:.2f})".format(**case["gain"]),
             f"{case['tokens_a_step']:.2f}",
             f"{case['accepted']}/{case['drafted']}" if case["drafted"] else "")
            for case in report["cases"]]

