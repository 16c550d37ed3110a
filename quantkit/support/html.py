"""Tables of HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, which is scrolled where it is too wide; all texts are escaped, and lines of a cell stand below
    each other."""
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell).replace(chr(10), '<br>')}</{tag}>"
                                for cell in cells) + "</tr>"

    return (f'<div style="overflow-x: auto"><table><caption>{escape(caption)}</caption>'
            f'<thead>{line("th", headers)}</thead>'
            f'<tbody>{"".join(line("td", row) for row in rows)}</tbody></table></div>')


def paragraphs(texts: Iterable[str]) -> str:
    """A paragraph for each text; all are escaped."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)
