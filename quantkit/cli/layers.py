"""Groups layers of the same kind, so that a model is a few rows on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import rich_click as click

Row = TypeVar("Row")


def layers_option(
        help: str = "Show one row per layer instead of one per kind of layer.") -> Callable[[Any], Any]:
    """The option ``--layers`` of a command."""
    return click.option("--layers", is_flag=True, help=help)


def short_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj`` → ``3.mlp.up_proj``."""
    return name.removeprefix("model.layers.")


def kind_of(name: str) -> str:
    """The same for all layers that stand at one place of the model: ``*.mlp.up_proj``."""
    return ".".join("*" if part.isdigit() else part for part in short_name(name).split("."))


def group_layers(rows: Iterable[Row], name: Callable[[Row], str], key: Callable[[Row], Hashable],
                 each: bool = False) -> list[tuple[str, list[Row]]]:
    """Rows of one kind and of equal keys together, in the order of the first of each.

    Args:
        rows: of layers.
        name: a row's full name.
        key: what else rows of a group have in common.
        each: a group for each row instead.

    Returns:
        The kind (with ``each`` the short name) and the rows of each group.
    """
    groups: dict[Hashable, tuple[str, list[Row]]] = {}
    for row in rows:
        label = short_name(name(row)) if each else kind_of(name(row))
        groups.setdefault((label, key(row)), (label, []))[1].append(row)
    return list(groups.values())
