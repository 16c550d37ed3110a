"""Stop strings in a stream: text that may be the start of one is held back."""

from __future__ import annotations


class StopStrings:
    """Feed text, get back what may be shown. ``found`` tells that a stop string came."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what is certainly before any stop string."""
        if self.found:
            return ""
        self._held += text
        hits = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if hits:
            self.found = True
            out, self._held = self._held[:min(hits)], ""
            return out
        keep = max((n for stop in self._stops for n in range(1, len(stop))
                    if self._held.endswith(stop[:n])), default=0)
        out, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        return out

    def finish(self) -> str:
        """The held text, now that nothing follows."""
        out, self._held = ("" if self.found else self._held), ""
        return out
