"""Tables of HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all texts are escaped, and lines of a cell stand below each other."""
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell).replace(chr(10), '<br>')}</{tag}>"
                                for cell in cells) + "</tr>"

    return (f'<table><caption>{escape(caption)}</caption><thead>{line("th", headers)}</thead>'
            f'<tbody>{"".join(line("td", row) for row in rows)}</tbody></table>')
