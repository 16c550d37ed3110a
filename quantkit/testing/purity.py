"""What every check asks of a function: that it changes nothing but its result, and gives it twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from quantkit.errors import PluginError
from quantkit.plugins import registry

T = TypeVar("T")
KIT = "quantkit.testing"
"""Owner of what a check registers for its own time."""


def pure(run: Callable[[], T], arguments: Mapping[str, torch.Tensor], where: str) -> T:
    """Call ``run`` twice; its first result.

    Args:
        run: the call.
        arguments: tensors that it is given, by name.
        where: what is called, for messages.

    Raises:
        PluginError: an argument was written to, the global generator was used, or the results differ.
    """
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    random = torch.get_rng_state()
    result = run()
    for name, tensor in arguments.items():
        if not torch.equal(tensor, before[name]):
            raise PluginError(f"{where} writes to {name}", why="it is read again by others",
                              next="work on a copy: x.clone()")
    if not torch.equal(random, torch.get_rng_state()):
        raise PluginError(f"{where} uses the global random generator", why="a result must not depend on it",
                          next="use torch.Generator().manual_seed(0)")
    if not same(result, run()):
        raise PluginError(f"{where} gives another result the second time",
                          why="a result depends on the arguments alone")
    return result


def same(first: Any, second: Any) -> bool:
    """Whether two results of tensors, in any mappings and sequences, are equal bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(
            first.nan_to_num(), second.nan_to_num())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@contextmanager
def registered(kind: str, name: str, target: object) -> Iterator[None]:
    """Have a thing registered while it is checked, unless it is already."""
    table = registry(kind)
    if name in table:
        if table.get(name) is not target:
            raise PluginError(f"{table.kind} {name!r} is registered by {table.entry(name).owner}",
                              why="it is another object than the one that is checked")
        yield
        return
    table.register(name, target, owner=KIT)
    try:
        yield
    finally:
        table.drop_owner(KIT)
