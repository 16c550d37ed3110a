"""The short way to write a drafter: ``ngram``, ``ngram(16)``, ``model(FOLDER, max_tokens=6)``."""

from __future__ import annotations

from quantkit.plugins.manager import describe_entry, registry
from quantkit.runtime.drafting.base import Drafter
from quantkit.support.call_text import made_with, named_options, read_call
from quantkit.support.errors import PluginError

_NEXT = 'quantkit generate MODEL PROMPT --draft "ngram(12)"'


def parse_drafter(text: str) -> Drafter | None:
    """A drafter with its options; ``None`` for ``none``.

    Raises:
        UsageError: it can't be read, names a drafter that nobody registered, or an option is off.
    """
    name, written = read_call(text, _NEXT)
    if name == "none" and not written:
        return None
    kind: type[Drafter] = registry("drafters").get(name)
    if (called := getattr(kind, "name", None)) != name:
        raise PluginError(f"{describe_entry('drafters', name)} calls itself {called!r}",
                          why="a class has the name that it is registered by",
                          next=f'name: ClassVar[str] = "{name}" in {kind.__name__}')
    options = named_options(written, kind.first, text, _NEXT)
    return made_with(kind, options, f"drafter {name!r}", "docs/drafts.md", "see docs/drafts.md")
