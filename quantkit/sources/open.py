"""Finds the source that a name means, and opens it."""

from __future__ import annotations

from quantkit.plugins.manager import registry
from quantkit.plugins.registry import BUILTIN, a_type, described
from quantkit.sources.base import ModelSource, SourceKind
from quantkit.sources.causal_lm import resolve_head, text_part
from quantkit.sources.split_experts import split_experts
from quantkit.sources.wrapper import CheckedSource
from quantkit.support.errors import SourceError


def open_source(uri: str, revision: str | None = None) -> ModelSource:
    """Find the kind of source that ``uri`` names and open it. Of a multimodal model, open the text part;
    experts that a file keeps in one tensor become a tensor each, and a head is the embedding only if its
    values are.

    Raises:
        SourceError: no kind of source takes the name, or its kind can't open it.
        PluginError: a plugin's kind opened something that isn't a source.
    """
    if (name := kind_of(uri)) is not None:
        kind: SourceKind = registry("sources").get(name)
        source = kind.open(uri, revision)
        if (entry := registry("sources").entry(name)).owner != BUILTIN:
            source = CheckedSource(source, f"source {name!r} of {entry.by}")
        try:
            return resolve_head(text_part(split_experts(source)))
        except SourceError:
            source.close()
            raise
    examples = ", ".join(kind.example for _, kind in _ordered())
    raise SourceError(f"no model found at {uri!r}", why="it is no folder, file, package or hub name",
                      next=f"give one of: {examples}")


def kind_of(uri: str) -> str | None:
    """The first kind of source that takes a name. A plugin's kind that can't be loaded, or that fails while
    it is asked, is passed over with one warning."""
    table = registry("sources")
    for name, kind in _ordered():
        try:
            matches: object = kind.matches(uri)
        except Exception as error:
            if table.entry(name).owner == BUILTIN:
                raise
            problem = f"matches() failed: {described(error)}"
        else:
            if isinstance(matches, bool):
                if matches:
                    return name
                continue
            problem = f"matches() returned {a_type(matches)}, not a bool"
        table.warn(name, f"source {name!r} of {table.entry(name).by}: {problem}")
    return None


def _ordered() -> list[tuple[str, SourceKind]]:
    """Every usable kind of source in the order in which they are asked."""
    table = registry("sources")
    kinds = []
    for name, kind in table.usable():
        for attribute, expected, noun in (("order", int, "an int"), ("example", str, "a str")):
            if not isinstance(value := getattr(kind, attribute), expected):
                table.reject(name, f"has {attribute} {value!r}, which isn't {noun}")
                break
        else:
            kinds.append((name, kind))
    return sorted(kinds, key=lambda pair: (pair[1].order, pair[0]))
