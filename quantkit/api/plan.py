"""Chooses weights and KV cache together for an amount of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from quantkit.api.evaluate import settings_of
from quantkit.api.progress import Progress, reported
from quantkit.capacity_search.search import Combination, candidates, combine, pareto_front
from quantkit.kv.spec import KVSpec
from quantkit.quantization.budget.amount import parse_bytes
from quantkit.runtime.memory.machine import available_memory, memory_limit
from quantkit.runtime.memory.serving import Requirements
from quantkit.support.errors import UsageError
from quantkit.support.html import html_table
from quantkit.support.units import human_bytes

CONTEXT = 8192
"""Tokens of a context, if none is named."""
SHARE = 0.9
"""Of the memory that is free, if none is named: the rest is left to other programs."""


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What fits into an amount of memory.

    Attributes:
        model, revision: the source.
        combinations: all pairs of weights and a KV setting, in the order of expected loss.
        left_out: recipes and settings that don't fit the model, and why.
    """

    model: str
    revision: str | None
    combinations: tuple[Combination, ...]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        outcome = "nothing fits"
        if any(combination.left >= 0 for combination in self.combinations):
            chosen = self.chosen
            outcome = (f"weights {chosen.weights.name}, KV cache {chosen.kv}, {human_bytes(chosen.total)} of "
                       f"{human_bytes(chosen.requirements.memory)}")
        return f"<quantkit.MemoryPlan {self.model}: {outcome}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the combinations that fit and that no other beats in both loss and size."""
        fitting = [combination for combination in self.combinations if combination.left >= 0]
        rows = [(other.weights.name, str(other.kv), "?" if other.kl is None else f"{other.kl:.3g}",
                 human_bytes(other.total), human_bytes(other.left))
                for other in pareto_front(fitting)]
        return html_table(repr(self)[1:-1], ("weights", "KV cache", "expected KL", "needed", "left"), rows)

    @property
    def chosen(self) -> Combination:
        """The first that fits. Raises UsageError: none does; it names what would."""
        for combination in self.combinations:
            if combination.left >= 0:
                return combination
        raise NothingFits(min(self.combinations, key=lambda combination: combination.total))

    @property
    def commands(self) -> list[str]:
        """What makes and serves the chosen combination."""
        chosen, at = self.chosen, f" --revision {quote(self.revision)}" if self.revision else ""
        commands, served = [], f"{quote(self.model)}{at}"
        if (recipe := chosen.weights.recipe) is not None:
            served = "OUT"
            commands.append(f"quantkit quantize {quote(self.model)}{at} --recipe {quote(recipe)} --out OUT")
        return [*commands, f"quantkit serve-local {served} --kv {quote(str(chosen.kv))} "
                           f"--max-batch {chosen.requirements.concurrency}"]


class NothingFits(UsageError):
    """No combination fits.

    Args:
        closest: the combination that needs least.
    """

    def __init__(self, closest: Combination) -> None:
        asked = closest.requirements
        ways = [f"memory={-(-closest.total // 10**6)}MB"]
        if context := closest.most_context():
            ways.append(f"context={context}")
        if count := closest.most_sequences():
            ways.append(f"concurrency={count}")
        many = f"{asked.concurrency:,} sequences" if asked.concurrency > 1 else "a sequence"
        super().__init__(
            f"nothing fits: {many} of {asked.context:,} tokens in {human_bytes(asked.memory)}",
            why=f"closest are weights {closest.weights.name} ({human_bytes(closest.weights.bytes)}) with a "
                f"KV cache {closest.kv} ({human_bytes(closest.kv_bytes + closest.spare_bytes)}):\n"
                f"{human_bytes(closest.total)} in all, {human_bytes(-closest.left)} too much",
            next=", or ".join(ways))
        self.closest = closest


def plan(model: str, *, context: int | None = None, memory: int | str | None = None, concurrency: int = 1,
         recipes: str | Sequence[str] = (), kv: str | Sequence[str | KVSpec] = (),
         prompt_tokens: int | None = None, revision: str | None = None,
         progress: Progress = True) -> MemoryPlan:
    """Find the weights and the KV setting that fit into an amount of memory and lose least.

    No weight is read. What this package's runtime holds on a CPU is counted; losses were measured on one
    small model.

    Args:
        model: anything that can be quantized, or a checkpoint, for which only the KV cache is chosen.
        context: tokens of each sequence, prompt and answer together; by default 8,192, or the model's most.
        memory: bytes for weights, KV cache and runtime, or a text: ``16GB``, ``24GiB``; by default nine
            tenths of what is free now.
        concurrency: sequences that run at once.
        recipes: only these; ``none`` leaves weights as they are. By default all that can be named.
        kv: only these KV settings; by default all codecs whose loss was measured.
        prompt_tokens: prompt tokens of a context, at whose end policies drop what they drop; by default
            half.
        revision: branch, tag or commit of a model on the hub.
        progress: whether a bar is shown, or a callback.

    Raises:
        UsageError: an argument is out of range, or there are recipes for a checkpoint.
        QuantkitError: the model isn't there or isn't known.

    >>> made = quantkit.plan("smollm2", context=2048, memory="2GB", recipes=["int8", "none"], progress=False)
    >>> made.chosen.weights.name, str(made.chosen.kv)
    ('none', 'none')
    >>> made.commands
    ['quantkit serve-local smollm2 --kv none --max-batch 1']
    """
    if memory is None:
        memory = int(SHARE * (available_memory() or memory_limit()))
    size = memory if isinstance(memory, int) else parse_bytes(memory, "memory")
    for name, value in (("context", context), ("concurrency", concurrency)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}", why="it must be at least 1")
    if prompt_tokens is not None and context is not None and prompt_tokens > context:
        raise UsageError(f"a prompt of {prompt_tokens:,} tokens is asked for",
                         why=f"a sequence has {context:,} tokens", next=f"a prompt of {context:,} at most")
    if isinstance(recipes, str):
        recipes = recipes.split(",")
    with reported(progress, f"planning for {model}") as listener:
        possible = candidates(model, revision, recipes, settings_of(kv), listener)
    if context is None:
        context = min(CONTEXT, possible.pairs[0][0].config.max_position_embeddings)
    combinations = combine(possible.pairs, Requirements(context, concurrency, size, prompt_tokens))
    return MemoryPlan(model, revision, tuple(combinations), possible.left_out)
