"""Log-probabilities of tokens after prefixes: each prefix is computed once, many of them side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantkit.evaluation.quality.feed import finite
from quantkit.evaluation.tasks.prefix_plan import PrefixPlan, Tokens, plan_prefixes
from quantkit.kv.base import PAGE
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.decoder import padded_rows
from quantkit.runtime.loader import LoadedModel

STEP_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens that go through the model at once: as many as its program takes at once."""
MAX_PADDED = 8
"""A step's rectangle of hidden states has at most this many times the tokens that a step takes."""
MIN_PART = 16
"""Tokens of a sequence in a step of a model that takes rectangles, at least."""
KV_BYTES = 2**29
"""Keys and values of the sequences that go side by side, at most; a single one may take more."""
LOGITS = 2**22
"""Logits that are computed at once, at most: 16 MiB, which a CPU's caches hold."""
HEAD_ROWS = 16, 512
"""Positions whose logits are computed at once, at least and at most."""


@dataclass(frozen=True)
class Target:
    """A token whose log-probability is wanted.

    Attributes:
        sequence: the number of its sequence.
        place: the place of the token in it that ``token`` follows.
        token: the id of the token.
    """

    sequence: int
    place: int
    token: int


@dataclass
class _ActiveRun:
    """A run on its way.

    Attributes:
        index: the number of the run in the plan.
        number: the number of its sequence in the cache.
        current: the plan's sequence that it reads now.
        done: tokens of that which the cache holds.
    """

    index: int
    number: int
    current: int
    done: int


class PrefixScorer:
    """Scores targets with one model, through a KV cache from which tokens can be taken back.

    Args:
        loaded: the model in memory.
        kv: how keys and values are kept.
        batch: sequences side by side, at most.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec, batch: int) -> None:
        self._loaded, self._batch = loaded, batch
        # the model masks what lies before a window; stored it stays, because later sequences go back there
        windowless = dataclasses.replace(loaded.config, sliding_windows=(None,) * loaded.config.num_layers)
        self._cache = KVCache(windowless, kv, loaded.dtype, loaded.model.device)

    @property
    def takes_back(self) -> bool:
        """Whether such a cache can do this, and what it gives is what decoding would read."""
        model, plain = self._loaded.model, self._cache.spec == KVSpec()
        return self._cache.divisible and (plain or (
            model.decode_matches_prefill and model.chunk_invariant(self._cache)))

    def score(self, sequences: Sequence[Tokens], targets: Sequence[Target],
              done: Callable[[npt.NDArray[np.int64]], None]) -> tuple[npt.NDArray[np.float64],
                                                                      npt.NDArray[np.bool_]]:
        """Compute log-probabilities.

        Args:
            sequences: token ids, none empty, each at most once.
            targets: tokens that follow some places in them.
            done: told the numbers of targets when they are finished.

        Returns:
            Of each target its natural log-probability, and whether greedy decoding chooses it.

        Raises:
            QuantkitError: the model's output is not finite.
            PluginError: that is the fault of a plugin's codec.
        """
        head = _Head(self._loaded, targets, done)
        rope = self._loaded.config.rope
        border = rope.original_max_positions if rope.kind == "longrope" else None
        for long in (False, True):  # which are rotated differently, the beginning too
            chosen = [ids for ids in sequences if (border is not None and len(ids) > border) == long]
            if chosen:
                self._walk(chosen, sequences, targets, head)
        head.flush()
        return head.logprobs, head.greedy

    def _walk(self, chosen: Sequence[Tokens], sequences: Sequence[Tokens], targets: Sequence[Target],
              head: _Head) -> None:
        longest = max(map(len, chosen))
        page_tokens = -(-longest // PAGE) * PAGE
        side_by_side = min(self._batch, KV_BYTES // (self._cache.bytes_per_token * page_tokens))
        device = self._loaded.model.device.type
        budget = STEP_TOKENS.get(device, max(STEP_TOKENS.values()))
        plan = plan_prefixes(chosen, max(1, side_by_side), budget)
        numbers: dict[Tokens, list[int]] = {ids: [] for ids in chosen}
        for number, target in enumerate(targets):
            if (ids := sequences[target.sequence]) in numbers:
                numbers[ids].append(number)
        wanted: list[dict[int, list[int]]] = [{} for _ in plan.sequences]
        for ids, computed_by in zip(plan.sequences, plan.computed_by()):
            for number in numbers[ids]:
                place = targets[number].place
                wanted[computed_by[place]].setdefault(place, []).append(number)
        _Walk(self._loaded, self._cache, plan, budget, longest, wanted, head).run()


class _Walk:
    """Takes all runs of a plan through the model side by side.

    Args:
        loaded: the model in memory.
        cache: gets a sequence for each run, of at most ``longest`` tokens.
        plan: the plan of the runs.
        budget: tokens that go through the model at once, at most.
        wanted: for each of its sequences, place → the numbers of targets that follow there.
        head: gets the hidden states of these places.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, plan: PrefixPlan, budget: int, longest: int,
                 wanted: Sequence[dict[int, list[int]]], head: _Head) -> None:
        self._model = loaded.model
        self._cache = cache
        self._plan = plan
        self._longest = longest
        self._wanted, self._head = wanted, head
        self._active: list[_ActiveRun] = []
        self._budget = budget
        self._rectangles = not loaded.model.chunk_invariant(cache)

    def run(self) -> None:
        try:
            for index, run in enumerate(self._plan.runs):
                if not run.inherited:
                    self._begin(_ActiveRun(index, self._cache.add(self._longest), run.first, 0))
            while self._active:
                self._step()
        finally:
            self._cache.free([active.number for active in self._active])

    def _begin(self, active: _ActiveRun) -> None:
        self._active.append(active)
        self._fork_next(active)

    def _fork_next(self, active: _ActiveRun) -> None:
        """Begin the next run if it inherits what this one has computed by now."""
        runs, index = self._plan.runs, active.index + 1
        if active.current != runs[active.index].first or index == len(runs) or not runs[index].inherited:
            return
        inherited, before = runs[index].inherited, active.done
        if before >= inherited and all(other.index != index for other in self._active):
            fork = _ActiveRun(index, self._cache.fork(active.number), runs[index].first, inherited)
            self._cache.take_back(fork.number, before - inherited)
            self._begin(fork)

    def _step(self) -> None:
        """Take some tokens of as many runs as fit through the model."""
        free = self._budget
        parts = list[tuple[_ActiveRun, Tokens]]()
        skipped = list[_ActiveRun]()
        limit = max(MIN_PART, free // len(self._active)) if self._rectangles else free
        longest = 0
        for active in self._active:
            part = self._plan.sequences[active.current][active.done:][:min(limit, free)]
            padded = (len(parts) + 1) * max(longest, len(part))
            if part and (not parts or padded <= MAX_PADDED * self._budget):
                parts.append((active, part))
                longest = max(longest, len(part))
                free -= limit if self._rectangles else len(part)
            else:
                skipped.append(active)
        batch = Batch(self._cache, [active.number for active, _ in parts])
        ids, positions, _ = padded_rows([part for _, part in parts], batch, self._model.device)
        hidden = self._model.hidden(ids, positions, batch)
        self._check(hidden, batch)
        self._active = skipped + [active for active, _ in parts]  # those first that had to wait
        for row, (active, part) in zip(hidden, parts):
            wanted = self._wanted[active.current]
            places = [place for place in range(active.done, active.done + len(part)) if place in wanted]
            self._head.add(row[[place - active.done for place in places]],
                           [wanted[place] for place in places])
            active.done += len(part)
            self._fork_next(active)
            if active.done == len(self._plan.sequences[active.current]):
                self._next(active)

    def _next(self, active: _ActiveRun) -> None:
        """Go on with the run's next sequence, if there is one."""
        active.current += 1
        if active.current == self._plan.runs[active.index].end:
            self._active.remove(active)
            self._cache.free([active.number])
            return
        shared = self._plan.shared[active.current]
        self._cache.take_back(active.number, active.done - shared)
        active.done = shared

    def _check(self, hidden: torch.Tensor, batch: Batch) -> None:
        if not bool(torch.isfinite(hidden).all()):
            for number in batch.numbers:
                if (fault := self._cache.codec_fault(number)) is not None:
                    raise fault


class _Head:
    """Makes log-probabilities of hidden states, a block of them at a time.

    Args:
        loaded: the model in memory.
        targets, done: as for :meth:`PrefixScorer.score`.

    Attributes:
        logprobs, greedy: the results so far.
    """

    def __init__(self, loaded: LoadedModel, targets: Sequence[Target],
                 done: Callable[[npt.NDArray[np.int64]], None]) -> None:
        self._loaded, self._done = loaded, done
        self._tokens = torch.tensor([target.token for target in targets], dtype=torch.int64)
        self.logprobs, self.greedy = np.zeros(len(targets)), np.zeros(len(targets), np.bool_)
        least, largest = HEAD_ROWS
        self._block = max(least, min(largest, LOGITS // loaded.config.vocab_size // least * least))
        self._hidden: list[torch.Tensor] = []
        self._numbers: list[list[int]] = []  # of the targets of each position

    def add(self, hidden: torch.Tensor, numbers: Sequence[list[int]]) -> None:
        """Take hidden states ``[n, hidden]``, each with the numbers of the targets that follow there."""
        if not numbers:
            return
        self._hidden.append(hidden)
        self._numbers += numbers
        while len(self._numbers) >= self._block:
            rows = torch.cat(self._hidden)
            self._compute(rows[:self._block], self._numbers[:self._block])
            self._hidden, self._numbers = [rows[self._block:]], self._numbers[self._block:]

    def flush(self) -> None:
        if self._numbers:
            self._compute(torch.cat(self._hidden), self._numbers)
        self._hidden, self._numbers = [], []

    def _compute(self, hidden: torch.Tensor, numbers: Sequence[list[int]]) -> None:
        rows = torch.tensor([row for row, several in enumerate(numbers) for _ in several])
        flat = np.array([number for several in numbers for number in several], np.int64)
        logprobs, greedy = token_logprobs(self._loaded, self._loaded.model.logits(hidden), rows,
                                          self._tokens[flat])
        self.logprobs[flat], self.greedy[flat] = logprobs.numpy(), greedy.numpy()
        self._done(flat)


def token_logprobs(loaded: LoadedModel, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of some tokens.

    Args:
        loaded: the model, for what is wrong with it.
        logits: the logits, ``[n, vocab]``.
        rows, tokens: int64 ``[m]``, on the CPU: which row, and which token of it.

    Returns:
        float64 and bool ``[m]``, on the CPU: log-probability, and whether the token is the first of the
        likeliest. A row's results don't depend on other rows.

    Raises:
        QuantkitError: the logits are not finite.
    """
    logits = logits.float()
    if len(logits) == 1:  # torch would share a single row's sum out to threads
        logits = logits.expand(2, -1)
    best = logits.amax(-1)
    finite(loaded, best)
    total = (logits - best[:, None]).exp_().sum(-1)
    rows, tokens = rows.to(logits.device), tokens.to(logits.device)
    values = logits[rows, tokens]
    logprobs = (values - best[rows]).double() - total[rows].double().log()
    greedy = values == best[rows]
    ties = greedy.nonzero()[:, 0]
    greedy[ties] = logits[rows[ties]].argmax(-1) == tokens[ties]
    return logprobs.cpu(), greedy.cpu()
