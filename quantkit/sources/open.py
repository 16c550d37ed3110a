"""Finds the source that a name means, and opens it."""

from __future__ import annotations

from quantkit.errors import SourceError
from quantkit.sources.base import ModelSource
from quantkit.sources.text_part import text_part


def open_source(uri: str, revision: str | None = None) -> ModelSource:
    """Find the kind of source that ``uri`` names and open it. Of a multimodal model, open the text part.

    Raises:
        SourceError: no kind of source takes the name, or its kind can't open it.
    """
    from quantkit.plugins import registry

    kinds = registry("sources")
    loaded = sorted(((kinds.get(name), name) for name in kinds), key=lambda k: (k[0].order, k[1]))
    for kind, _ in loaded:
        if kind.matches(uri):
            source: ModelSource = kind.open(uri, revision)
            try:
                return text_part(source)
            except SourceError:
                source.close()
                raise
    examples = ", ".join(kind.example for kind, _ in loaded)
    raise SourceError(f"no model found at {uri!r}", why="it is no folder, file, package or hub name",
                      next=f"give one of: {examples}")
