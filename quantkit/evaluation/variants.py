"""What the variants of a comparison are called, in reports, gates and when two results are matched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from quantkit.evaluation.result import ModelResult


def short_names(rows: Sequence[ModelResult]) -> list[str]:
    """A name for each row, on one line: its recipe, or the last part of its model's path or name. Models that
    share that get more of theirs. Another tool's name stands before, and its method follows where it runs one
    model in several ways. Where the KV cache was varied or compressed, its setting follows."""
    recipes: dict[str, set[str]] = {}
    for row in rows:
        if row.recipe:
            recipes.setdefault(row.recipe, set()).add(row.model)
    named = [row.recipe if row.recipe and len(recipes[row.recipe]) == 1 else None for row in rows]
    paths = {row.model: Path(row.model).parts or (row.model,) for row, name in zip(rows, named) if not name}
    short = {}
    for model, parts in paths.items():
        depth = 1
        while depth < len(parts) and sum(other[-depth:] == parts[-depth:] for other in paths.values()) > 1:
            depth += 1
        short[model] = str(Path(*parts[-depth:]))
    names = [(f"{row.tool.split()[0]} " if row.tool else "") + (name or short[row.model])
             for row, name in zip(rows, named)]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [printable(f"{name} {row.method}" if row.tool and name in repeated else name)
            + (f" kv {row.kv}" if row.kv is not None else "") for row, name in zip(rows, names)]


def names_of(row: ModelResult, short: str) -> frozenset[str]:
    """Everything that a person may call a row: the name that reports show, the same without its KV setting,
    its recipe, its model, and the last part of that. Another tool's row has the first alone: the model may be
    a row of quantkit's too."""
    if row.tool:
        return frozenset({short})
    base = short.removesuffix(f" kv {row.kv}")
    names = {base, row.model, Path(row.model).name, row.recipe or base}
    if row.kv is not None:
        names |= {f"{name} kv {row.kv}" for name in names}
    return frozenset(names | {short} - {""})


def printable(name: str) -> str:
    """A stranger's text on one line, without what XML can't hold and a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(name.split()))
