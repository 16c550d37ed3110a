"""What the checks share: saying which promise was broken, and noticing what plugin code touches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from quantkit.plugins.manager import registry
from quantkit.plugins.registry import described
from quantkit.support.errors import PluginError, QuantkitError

Result = TypeVar("Result")
KIT = "quantkit.testing"
"""The owner of what a check registers for its own time."""


class Contract:
    """Says which promise a thing broke, and where.

    Args:
        where: the thing and its circumstances: ``method 'odd' at int4 channel sym, weight 'normal'``.
        promises: the module whose docstrings say what is promised.
    """

    def __init__(self, where: str, promises: str) -> None:
        self.where, self.promises = where, promises

    def at(self, circumstances: str) -> Contract:
        """The same thing in further circumstances."""
        return Contract(f"{self.where}, {circumstances}", self.promises)

    def must(self, holds: bool, broken: str, next: str | None = None) -> None:
        """Raise PluginError with the sentence ``broken`` unless it ``holds``."""
        if not holds:
            raise self.error(broken, next)

    def must_not(self, fault: str | None) -> None:
        """Raise PluginError with what the checks at run time found, if it is anything."""
        if fault is not None:
            raise self.error(fault)

    def error(self, broken: str, next: str | None = None) -> PluginError:
        return PluginError(f"{self.where}: {broken}", why=f"{self.promises} says what is promised", next=next)

    def call(self, what: str, function: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Call plugin code that must succeed. Raises PluginError, naming ``what`` was called."""
        try:
            return function(*args, **named)
        except PluginError as error:
            raise PluginError(f"{self.where}: {error.what}", why=error.why, next=error.next) from error
        except Exception as error:  # plugin code may raise anything
            raise self.error(f"{what} raises {_raised(error)}") from error

    def check_refusal(self, what: str, function: Callable[..., object], *args: Any,
                      accepted: str, remedy: str, kind: type[QuantkitError] = QuantkitError) -> None:
        """Call plugin code that must raise ``kind``.

        Args:
            what: the sentence's subject: what is called.
            function: the function that is called with ``args``.
            accepted: the sentence for when it doesn't raise.
            remedy: the sentence that says what it should raise.
            kind: the error that is right.
        """
        try:
            function(*args)
        except kind as error:
            if isinstance(error, PluginError) and kind is not PluginError:
                raise PluginError(f"{self.where}: {accepted}; {error.what}", why=error.why,
                                  next=remedy) from error
            return
        except Exception as error:  # plugin code may raise anything
            raise self.error(f"{what} raises {_raised(error)}", remedy) from error
        raise self.error(accepted, remedy)

    def reason(self, what: str, function: Callable[..., object], *args: Any) -> str | None:
        """Call plugin code that returns a reason or ``None``. Raises PluginError for anything else."""
        reason = self.call(what, function, *args)
        self.must(reason is None or (isinstance(reason, str) and reason.strip() != ""),
                  f"{what} returned {reason!r:.80}; it must be the reason as a sentence, or None")
        assert reason is None or isinstance(reason, str)
        return reason

    def pure(self, what: str, function: Callable[[], Result],
             arguments: Mapping[str, torch.Tensor]) -> Result:
        """Call ``function`` twice; its first result.

        Args:
            what: the sentence's subject: what is called.
            function: makes the call.
            arguments: tensors that it is given, by name.

        Raises:
            PluginError: it raises, writes to an argument or uses torch's global random generator, or the
                results differ.
        """
        before = {name: tensor.clone() for name, tensor in arguments.items()}
        state = torch.get_rng_state()
        result = self.call(what, function)
        self.must(torch.equal(state, torch.get_rng_state()), f"{what} used the global random generator",
                  "use torch.Generator().manual_seed(…) of its own")
        for name, tensor in arguments.items():
            self.must(same(tensor, before[name]), f"{what} writes to {name}", "work on a copy: x.clone()")
        self.must(same(result, function()), f"{what} gives another result the second time")
        return result


def _raised(error: Exception) -> str:
    """An exception in one line, with its type."""
    ours = f"{type(error).__name__}: " if isinstance(error, QuantkitError) else ""
    return ours + described(error)


def named_class(kind: object, base: type, noun: str) -> str:
    """The name of a class that is registered. Raises PluginError: it is no subclass of ``base``, or has no
    name."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise PluginError(f"{kind!r} is no {noun}",
                          why=f"it must be a subclass of {base.__module__}.{base.__name__}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(f"{kind.__name__} has no name",
                          next='name: ClassVar[str] = "…", as it is registered')
    return name


@contextlib.contextmanager
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


def same(first: Any, second: Any) -> bool:
    """Whether two results of tensors, in any mappings and sequences, are equal bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return same_bits(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal dtypes, shapes and bytes; NaN equals NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                         for tensor in (first, second)))
