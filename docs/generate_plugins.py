"""Fills the examples of ``docs/plugins/*.md`` with what ``quantkit plugins new`` makes: the tested code.

``<!-- example: PATH -->`` stands before a code block; ``PATH`` is a file of the page's example.
"""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.testing.scaffold.kinds import KINDS
from quantkit.testing.scaffold.names import plugin_names
from quantkit.testing.scaffold.render import render

PAGES = Path(__file__).parent / "plugins"
BLOCK = re.compile(r"(<!-- example: (\S+) -->\n```\w+\n).*?(^```$)", re.MULTILINE | re.DOTALL)


def filled(kind: str, page: str) -> str:
    """A page with its examples as they are now."""
    files = render(plugin_names(KINDS[kind].example, KINDS[kind]), KINDS[kind])
    return BLOCK.sub(lambda match: match[1] + files[match[2]] + match[3], page)


if __name__ == "__main__":
    for name in KINDS:
        path = PAGES / f"{name}.md"
        path.write_text(filled(name, path.read_text(encoding="utf-8")), encoding="utf-8")
