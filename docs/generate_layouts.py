"""Writes the table "What loads where" of docs/checkpoints.md from docs/layouts.yaml:
python docs/generate_layouts.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quantkit.support.safe_yaml import read_yaml

DATA = Path(__file__).with_name("layouts.yaml")
PAGE = Path(__file__).with_name("checkpoints.md")
BLOCK = re.compile(r"(<!-- layouts -->\n).*?(<!-- end of layouts -->\n)", re.DOTALL)
WORDS = {"same": "same tokens", "loads": "loads: {why}", "refused": "refused: {text}",
         "unrun": "not run here: {text}"}
"""What the table shows, by the key of a cell."""


def read() -> dict[str, Any]:
    """The file's engines, notes and layouts, each with a cell for every engine."""
    data = read_yaml(DATA).data
    return data | {"layouts": [data["usual"] | layout for layout in data["layouts"]]}


def kind_of(cell: dict[str, str]) -> str:
    """Which of :data:`WORDS` a cell has. Raises ValueError unless it has just one."""
    (kind,) = WORDS.keys() & cell.keys()
    return kind


def shown(cell: dict[str, str], notes: list[str]) -> str:
    """A cell of the table, with the number of its footnote."""
    kind = kind_of(cell)
    text = WORDS[kind].format(why=cell.get("why"), text=cell.get("text", cell[kind]))
    return f"{text} ({notes.index(cell['note']) + 1})" if "note" in cell else text


def table() -> str:
    """The table, and its footnotes as a list."""
    data = read()
    engines, notes = data["engines"], list(data["notes"])
    lines = [f"| layout | {' | '.join(engines.values())} |", "|---" * (len(engines) + 1) + "|"]
    for layout in data["layouts"]:
        cells = [shown(layout[engine], notes) for engine in engines]
        lines.append(f"| {layout['title']} | {' | '.join(cells)} |")
    footnotes = [f"{number}. {data['notes'][note]}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *footnotes, ""])


def filled(page: str) -> str:
    """The page with its table as it is now."""
    return BLOCK.sub(lambda match: match[1] + table() + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
