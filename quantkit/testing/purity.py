"""What every check asks of a function: that it changes nothing but its result, and gives it twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing.contract import Contract, global_generators, same_bits

T = TypeVar("T")
KIT = "quantkit.testing"
"""Owner of what a check registers for its own time."""


def pure(contract: Contract, what: str, run: Callable[[], T], arguments: Mapping[str, torch.Tensor]) -> T:
    """Call ``run`` twice; its first result.

    Args:
        contract: of the thing whose code is called.
        what: is called, for messages: ``encode()``.
        run: the call.
        arguments: tensors that it is given, by name.

    Raises:
        PluginError: it raises, writes to an argument or uses a global generator, or the results differ.
    """
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    with global_generators(contract):
        result = contract.call(what, run)
    for name, tensor in arguments.items():
        contract.must(same_bits(tensor, before[name]), f"{what} writes to {name}",
                      "work on a copy: x.clone()")
    contract.must(same(result, run()), f"{what} gives another result the second time")
    return result


def same(first: Any, second: Any) -> bool:
    """Whether two results of tensors, in any mappings and sequences, are equal bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return same_bits(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@contextmanager
def registered(kind: str, name: str, target: object) -> Iterator[None]:
    """Have a thing registered while it is checked, unless it is already. Raises PluginError: the name is
    another thing's."""
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
