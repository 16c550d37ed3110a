"""How many prompt tokens go through the model between two tokens of the sequences that decode beside it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low

SLOWDOWN = 3
"""The largest allowed gap between tokens, as a multiple of the usual gap, where that is above the limit."""
AIM = 0.95
"""Part of the longest gap that a chunk is sized for: two steps never take exactly the same time."""
LEAST = 16
"""The least number of a prompt's tokens in a step, on any machine. With fewer, most of the time would
be what any chunk takes, however small."""
REFRESH = 64
"""Steps with chunks after which one without a chunk shows the usual gap again."""
GAPS, CHUNKS = 15, 3
"""The number of recent measurements whose median counts, so that a disturbed one doesn't."""
BASELINE_STEPS = 2
"""Steps without a chunk that measure the usual gap after the number of sequences has changed. The shorter one
counts. With a single one that other work slowed down, the next chunks could take three times that long."""


class ChunkSizer:
    """Sizes the chunks of prompts by measured time, so that gaps between others' tokens stay short.

    The next chunk is what fits beside a usual decode step if a token costs what it did in the last chunks.
    Their fixed cost is in that, and attention's to a context that grows: both change little from a chunk to
    the next. A chunk is at most twice as large as the largest of those, so that nothing is risked on a guess.

    Args:
        largest: tokens of a chunk, at most.
        max_itl: seconds between two tokens of a sequence, or :data:`SLOWDOWN` times the usual gap if that is
            more. ``None``: every chunk is the largest.
    """

    def __init__(self, largest: int, max_itl: float | None) -> None:
        self._largest, self._max_itl = largest, max_itl
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._chunks: deque[tuple[int, float]] = deque(maxlen=CHUNKS)  # tokens, and seconds of each token
        self._running = 0  # tokens of the chunk that a device was given in the last step
        self._rows = self._age = 0  # sequences whose usual gap is known, and steps with chunks since then

    def tokens_in(self, seconds: float) -> int:
        """Tokens of the next chunk while others decode, if it may take so long."""
        if self._max_itl is None:
            return self._largest
        least = min(LEAST, self._largest)
        if not self._chunks:
            return least
        fits = int(seconds / median(cost for _, cost in self._chunks))
        tried = max(tokens for tokens, _ in self._chunks)
        return max(least, min(fits, 2 * tried, self._largest))

    def begin(self, rows: int) -> None:
        """A step in which ``rows`` sequences decode begins. What was usual with fewer or more isn't now."""
        if abs(rows - self._rows) * 4 > self._rows:
            self._rows = rows
            self._gaps.clear()

    @property
    def blind(self) -> bool:
        """Whether the usual gap isn't known, or was measured long ago: steps without a chunk show it."""
        return self._max_itl is not None and (len(self._gaps) < BASELINE_STEPS or self._age >= REFRESH)

    @property
    def spare(self) -> float:
        """Seconds of a gap that are a prompt's."""
        return math.inf if self._max_itl is None else AIM * self.longest_gap - self._usual

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max(self._max_itl or 0.0, SLOWDOWN * self._usual)

    @property
    def _usual(self) -> float:
        return median_low(self._gaps) if self._gaps else 0.0

    def observe(self, seconds: float, tokens: int, *, ahead: bool = False) -> None:
        """Learn from a step in which others decoded.

        Args:
            seconds: that it took.
            tokens: of the chunk that it ran; 0: none.
            ahead: it waited for what a device was given in the step before, and its own chunk still runs.
        """
        if ahead:
            tokens, self._running = self._running, tokens
        else:
            self._running = 0
        if not tokens:
            self._gaps.append(seconds)
            self._age = 0
            return
        self._age += 1
        # where a step's time varies by more than the chunk takes, the chunk still takes something
        self._chunks.append((tokens, max(seconds - self._usual, seconds / 10) / tokens))

    def skip(self) -> None:
        """A step that says nothing: nobody decoded, or a prompt ended and its policy acted."""
        self._running = 0
