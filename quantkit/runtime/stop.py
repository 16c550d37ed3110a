"""Stop strings in a stream: text that may be the start of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text in pieces, get back what may be shown.

    The stop string that is complete first ends the text, and of those that end together the longest:
    how the text was cut into pieces makes no difference.

    Args:
        stops: the strings; none is empty.

    Attributes:
        found: the stop string that came, or ``None`` so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certainly before any stop string. After one, nothing."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(start + len(stop), start, stop) for stop in self._stops
                if (start := self._held.find(stop)) >= 0]
        if hits:
            _, end, self.found = min(hits)
        else:
            end = len(self._held) - self._possible()
        out, self._held = self._held[:end], "" if self.found is not None else self._held[end:]
        return out

    def finish(self) -> str:
        """The held text, now that nothing follows."""
        out, self._held = self._held, ""
        return out

    def _possible(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        return max((size for stop in self._stops for size in range(1, min(len(stop), len(self._held) + 1))
                    if self._held.endswith(stop[:size])), default=0)
