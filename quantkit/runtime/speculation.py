"""Drafts for the requests of an engine: whose turn it is, how long they are, and what became of them.

A draft is as long as makes tokens come fastest, by what was measured; there is none below break-even. Only
speed depends on these measurements, never a result.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quantkit.kv.base import PAGE
from quantkit.plugins.manager import describe_entry
from quantkit.plugins.registry import described
from quantkit.runtime.core import NextLogits, Request, TokenResult, sampled
from quantkit.runtime.drafting.base import DraftedText, Drafter, DraftSource
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.kv import NO_DRAFTS, DraftMemory
from quantkit.runtime.program_model import ProgramModel
from quantkit.support.errors import PluginError, UsageError


@dataclass
class DraftCounts:
    """What became of drafts.

    Attributes:
        drafts: number of drafts that were checked.
        tokens, accepted: number of their tokens, and of those that were right.
        accepted_at: how often the token at each place was right.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """A draft of ``drafted`` tokens was checked, and its first ``accepted`` were right."""
        self.drafts += 1
        self.tokens += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


class Speculator:
    """Asks a drafter for drafts where they pay.

    A drafter that fails is not asked again, and answers go on without drafts.

    Args:
        drafter: proposes tokens that the model then confirms.
        clock: returns the time in seconds.

    Attributes:
        times: measured times of steps and drafts.
        counts: results of all drafts so far.

    Raises:
        UsageError: the drafter can't draft for this model.
    """

    def __init__(self, drafter: Drafter, loaded: LoadedModel,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._drafter, self._vocab = drafter, loaded.config.vocab_size
        # a step of a GPU is no more than one graph
        self._rows = loaded.model.decode_rows if loaded.model.runs_ahead else None
        self._source: DraftSource | None = drafter.start(loaded)
        if self._source.layers and not isinstance(loaded.model, ProgramModel):
            raise UsageError(f"{drafter.name} can't draft for {loaded.uri}", next="take another drafter",
                             why="it goes on from hidden states, which this model doesn't hand out")
        self._texts: dict[int, _Text] = {}
        self.times, self.counts = StepTimes(), DraftCounts()
        self._in_a_row = 0  # steps with drafts
        self._ahead = 0  # steps that are launched before their turn comes again

    @property
    def nbytes(self) -> int:
        """Bytes of memory that drafting takes beside the model."""
        return 0 if self._source is None else self._source.nbytes

    @property
    def memory(self) -> DraftMemory:
        """What drafts take beside the KV cache."""
        return NO_DRAFTS if self._source is None else self._source.memory

    @property
    def rows(self) -> int:
        """Tokens of a text in a step, at most."""
        return 1 + self._drafter.max_tokens

    def preallocate(self, tokens: int) -> None:
        """Take the memory for ``tokens`` tokens in all: graphs of a GPU point to pages that don't move."""
        if self._source is not None and (cache := self._source.cache) is not None:
            for layer in cache.layers:
                layer.store.pages.preallocate(-(-tokens // PAGE) * cache.heads)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose inputs :meth:`observe` is to be told of, as :attr:`Batch.taps`."""
        return () if self._source is None else self._source.layers

    def observe(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Tokens of a request went through the model; see
        :meth:`~quantkit.runtime.drafting.base.DraftSource.observe`."""
        if self._source is None or not request.kv.manager.drafts or request.prefill.pooler is not None or (
                request.sampling.max_tokens < 2):  # the only token comes of the prompt
            return
        if (text := self._texts.get(request.id) or self._begin(request)) is None:
            return
        text.note(request)
        try:
            self._source.observe(text.drafted, start, hidden)
        except Exception as error:
            self._give_up(error)

    def due(self, requests: Sequence[Request]) -> bool:
        """Whether drafts are worth that a step which was launched is waited for, since they go on from its
        tokens. They aren't while all of these texts pause, and for some steps after nothing was drafted."""
        pauses = [text.acceptance for request in requests
                  if (text := self._texts.get(request.id)) is not None and text.acceptance.pause > 1]
        self._ahead = max(0, self._ahead - 1)
        if self._source is not None and not self._ahead and len(pauses) < len(requests):
            return True
        for acceptance in pauses:
            acceptance.pause -= 1
        return False

    def propose(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Drafts of some of these requests, which decode in this step, by their ids. Not for steps that read
        prompts too: their tokens fill the step."""
        drafts = {} if self._in_a_row >= STEPS_BETWEEN else self._drafts(requests)
        self._in_a_row = self._in_a_row + 1 if drafts else 0
        self._ahead = 0 if drafts else STEPS_AHEAD
        return drafts

    def _drafts(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        asked: list[tuple[_Text, int]] = []
        left = None if self._rows is None else max(0, self._rows - len(requests))
        for request in requests:
            if self._source is None or not request.kv.manager.drafts:
                continue
            text = self._texts.get(request.id) or self._begin(request)
            if text is None or left == 0 or not (length := self._length(text, request, len(requests) - 1)):
                continue
            if left is not None:
                length = min(length, left)
                left -= length
            text.update(request)
            asked.append((text, length))
        if not asked or self._source is None:
            return {}
        begin = self._clock()
        try:
            drafts = self._source.propose([text.drafted for text, _ in asked],
                                          [length for _, length in asked])
            self._check(drafts, asked)
        except Exception as error:
            self._give_up(error)
            return {}
        if not self._source.cold:  # texts that are drafted side by side share the time
            self.times.observe_draft(max([1, *map(len, drafts)]), self._clock() - begin)
        return {text.id: list(draft) for (text, _), draft in zip(asked, drafts) if draft}

    def verify(self, part: NextLogits) -> Iterator[TokenResult]:
        """Choose tokens as long as requests' drafts are right, and the one behind them.

        Results come one by one. Whoever takes them gives each to its request before taking the next one: a
        token is chosen by those before it, and an answer may end in the middle of a draft.

        Args:
            part: the logits of a step with drafts.
        """
        assert part.drafts is not None and part.batch is not None
        parts = part.logits.split([1 + len(draft) for draft in part.drafts])
        for request, draft, logits, place, ahead in zip(part.requests, part.drafts, parts, part.places,
                                                        part.draw_ahead(), strict=True):
            if request.done:
                continue
            right = judged = 0
            ended = False
            for at, (row, drafted) in enumerate(zip(logits, [*draft, None])):
                if ahead is None:
                    (result,) = NextLogits([request], row[None]).sample()
                else:
                    result = sampled(request, ahead[at], row)
                    request.sampler.drawn += 1
                right += result.token == drafted
                judged += drafted is not None
                # before its listener hears of the last token
                request.result.accepted_tokens += result.token == drafted
                request.result.drafted_tokens += drafted is not None
                yield result
                ended = request.done or request.cancelled  # its listener may want no more
                if ended or result.token != drafted:
                    break
            if not draft:
                continue
            if not ended:
                request.result.drafted_tokens += len(draft) - judged
                judged = len(draft)
            self.counts.add(judged, right)
            if (text := self._texts.get(request.id)) is not None:
                text.acceptance.observe(judged, right)
            if request.kv.sequence < 0:  # it failed
                continue
            try:
                part.batch.accept(place, 1 + right)
            except Exception as error:  # of its policy
                yield TokenResult(request, error=error)

    def end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if (text := self._texts.pop(request.id, None)) is not None and self._source is not None:
                try:
                    self._source.end(text.drafted)
                except Exception as error:
                    self._give_up(error)

    def _begin(self, request: Request) -> _Text | None:
        if self._source is None:
            return None
        text = _Text(request)
        try:
            self._source.begin(text.drafted)
        except Exception as error:
            self._give_up(error)
            return None
        self._texts[request.id] = text
        return text

    def _length(self, text: _Text, request: Request, others: int) -> int:
        """Tokens that this text's draft may have now."""
        limit = min(self._drafter.max_tokens, request.tokens_left - 1)
        if limit < 1:
            return 0
        best = 0 if text.acceptance.pause else best_length(text.acceptance, self.times, others, limit)
        wanted = text.acceptance.length(best, trial_length(self.times, limit), limit)
        return request.kv.manager.room_for_draft(request.kv, wanted) if wanted else 0

    def _check(self, drafts: Sequence[Sequence[int]], asked: Sequence[tuple[_Text, int]]) -> None:
        """Raises PluginError: these aren't drafts as they were asked for."""
        ids = range(self._vocab)
        if len(drafts) == len(asked) and all(
                len(draft) <= limit and all(type(token) is int and token in ids for token in draft)
                for draft, (_, limit) in zip(drafts, asked)):
            return
        raise PluginError("what it drafted can't be used", next="see docs/plugin-reference.md",
                          why="a draft is a list of the model's token ids, no longer than its limit, one for "
                              "each text")

    def _give_up(self, error: Exception) -> None:
        self._source = None  # and with it all that it keeps
        self._texts.clear()
        drafter = describe_entry("drafters", self._drafter.name)
        warnings.warn(f"{drafter} failed, and answers go on without drafts: {described(error)}", stacklevel=2)


class _Text:
    """A request as its drafter sees it.

    Attributes:
        id: number of the request.
        drafted: the text that the drafter gets.
        acceptance: how often its drafts were right.
    """

    def __init__(self, request: Request) -> None:
        self.id, self.acceptance = request.id, Acceptance()
        self._tokens = request.kv.history
        self.drafted = DraftedText(self._tokens, request.kv.manager.cache, request.kv.sequence,
                                   lambda logits: int(logits.argmax()))

    def note(self, request: Request) -> None:
        """Note what was generated since, and where it is."""
        self._tokens += request.result.token_ids[len(self._tokens) - len(request.prompt):]
        self.drafted.sequence = request.kv.sequence

    def update(self, request: Request) -> None:
        """The same, and what will be chosen from."""
        self.note(request)
        tokens, drafted = self._tokens, self.drafted
        preview, history = request.sampler.preview(), tokens if not request.sampler.changes else list(tokens)

        def choose(logits: torch.Tensor) -> int:
            token = preview(logits, history)
            if request.sampler.changes:
                history.append(token)
            return token

        drafted.choose = choose


MEMORY = 0.9
"""How much an observation still counts after the next one."""
FASTER, SLOWER = 0.4, 0.1
"""How much of a time that is expected is what was measured last; a disturbed step only takes longer."""
OUTLIER = 2.0
"""A step that took more than this many times what was expected counts as having taken so long."""
PRIOR = 0.75
"""The part of drafted tokens that is expected to be right before any were checked."""
PRIOR_WEIGHT = 2.0
"""Observations that this counts as."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Steps without a draft after one that didn't pay, until the next try; doubled after each."""
TRIAL, TRIAL_COST = 4, 0.5
"""Tokens of a draft that finds out whether drafts pay again, and steps that they may cost. After one that was
right, another of twice its length follows."""
MARGIN = 1.03
"""How many times as fast as without a draft one must promise to be: what is measured is uncertain."""
STEPS_BETWEEN = 64
"""Steps with drafts after which one goes without: only its time shows whether they pay."""
STEPS_AHEAD = 6
"""Steps that a GPU is given ahead after one for which nothing was drafted: a draft needs the token of the
step before, and to wait for it costs what the host does meanwhile."""
STALE = 0.5
"""How much of the time of a step with one row is what was measured last, if nothing was for that long."""
ROW_COST = 0.12
"""What another row is expected to cost, as a part of a step with one, before it was measured."""


@dataclass
class Acceptance:
    """How often the drafts of a text were right.

    Attributes:
        hits, misses: drafted tokens that were right, and drafts that went wrong, recent ones above all.
        pause: steps until the next try, while drafts don't pay.
        trial: tokens of the next try, if the last one was right; or 0.
    """

    hits: float = PRIOR * PRIOR_WEIGHT
    misses: float = (1 - PRIOR) * PRIOR_WEIGHT
    pause: int = 0
    trial: int = 0
    _next_pause: int = FIRST_PAUSE

    @property
    def rate(self) -> float:
        """Probability that a drafted token is right if those before it were."""
        return self.hits / (self.hits + self.misses)

    def observe(self, drafted: int, accepted: int) -> None:
        """A draft of ``drafted`` tokens was checked, and its first ``accepted`` were right."""
        self.hits = MEMORY * self.hits + accepted
        self.misses = MEMORY * self.misses + (accepted < drafted)
        if accepted < drafted:
            self.trial = 0

    def length(self, best: int, first: int, limit: int) -> int:
        """Tokens of the next draft: ``best``, if that is any; a try has at least ``first``, and at most
        ``limit``."""
        if self.pause:
            self.pause -= 1
            if not self.pause:
                self.trial = first
                return first
        elif best:
            self.trial, self._next_pause = 0, FIRST_PAUSE
            return best
        elif 0 < self.trial < limit:
            self.trial = min(2 * self.trial, limit)
            return self.trial
        else:
            self.trial, self.pause = 0, self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return 0


class StepTimes:
    """What steps of the model take by their number of rows, and what drafting a token takes.

    Texts grow longer and steps with them, so times are kept as a step of one row and ratios to it. A time
    with more rows changes its ratio alone: if it changed both, either could drift wherever every step has
    drafts.

    Attributes:
        base_s: seconds of a step with one row; 0: none was timed.
        draft_s: seconds to draft a token.
    """

    def __init__(self) -> None:
        self.base_s = self.draft_s = 0.0
        self._ratios = {1: 1.0}
        self._warm = False
        self._since = 0  # steps since one with one row

    def observe(self, rows: int, seconds: float) -> None:
        """A step had ``rows`` rows."""
        expected = self.ratio(rows)
        if not self.base_s:
            self.base_s = seconds / expected
            return
        # one that waited for another process says nothing
        seconds = min(seconds, OUTLIER * self.base_s * expected)
        if rows > 1:
            self._since += 1
            self._ratios[rows] = _towards(expected, seconds / self.base_s)
        else:
            self.base_s = _towards(self.base_s, seconds, at_least=min(STALE, self._since / STEPS_BETWEEN))
            self._since = 0

    def observe_draft(self, tokens: int, seconds: float) -> None:
        """Drafting ``tokens`` tokens took this long. The first time says nothing: it was cold."""
        if not self._warm:
            self._warm = True
            return
        token_s = seconds / tokens
        self.draft_s = _towards(self.draft_s, token_s) if self.draft_s else token_s

    def ratio(self, rows: int) -> float:
        """How often as long as one row this number of rows takes; between numbers that were timed, and beyond
        them, on a line."""
        known = self._ratios
        if rows in known:
            return known[rows]
        below = max(number for number in known if number < rows)
        above = min((number for number in known if number > rows), default=None)
        if above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        slope = (known[below] - 1) / (below - 1) if below > 1 else ROW_COST
        return known[below] + max(slope, 0.0) * (rows - below)


def _towards(expected: float, seen: float, at_least: float = 0.0) -> float:
    return expected + max(FASTER if seen < expected else SLOWER, at_least) * (seen - expected)


def trial_length(times: StepTimes, limit: int) -> int:
    """The length of a draft that finds out whether drafts pay again: short where they are dear."""
    token = times.ratio(2) - 1 + (times.draft_s / times.base_s if times.base_s else 0.0)
    return max(1, min(TRIAL, limit, int(TRIAL_COST / max(token, 1e-9))))


def best_length(acceptance: Acceptance, times: StepTimes, others: int, limit: int) -> int:
    """The length of a draft that makes a text's tokens come fastest; 0 if none is faster than no draft.

    Args:
        acceptance: counts which of the text's drafts were right.
        others: rows that other texts have in the step. What a draft costs, they wait for too.
        limit: the longest that is possible.
    """
    rate, draft = acceptance.rate, times.draft_s / times.base_s if times.base_s else 0.0
    best, fastest = 0, MARGIN * (1.0 + others) / times.ratio(1 + others)
    expected, chance = 1.0, 1.0
    for length in range(1, limit + 1):
        chance *= rate
        expected += chance
        speed = (expected + others) / (times.ratio(1 + length + others) + draft * length)
        if speed > fastest:
            best, fastest = length, speed
    return best
