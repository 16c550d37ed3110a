"""What the checks share: saying which promise was broken, and noticing what plugin code touches."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

from quantkit.plugins.manager import registry
from quantkit.plugins.registry import described
from quantkit.support.errors import PluginError, QuantkitError

Result = TypeVar("Result")


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

    def error(self, broken: str, next: str | None = None) -> PluginError:
        """The error to raise."""
        return PluginError(f"{self.where}: {broken}", why=f"{self.promises} says what is promised", next=next)

    def call(self, what: str, function: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Call plugin code that must succeed. Raises PluginError, naming ``what`` was called."""
        try:
            return function(*args, **named)
        except PluginError as error:
            raise PluginError(f"{self.where}: {error.what}", why=error.why, next=error.next) from error
        except Exception as error:  # whatever a stranger's code raises
            raise self.error(f"{what} raises {raised(error)}") from error

    def refuses(self, what: str, function: Callable[..., object], *args: Any,
                accepted: str, remedy: str, kind: type[QuantkitError] = QuantkitError) -> QuantkitError:
        """Call plugin code that must raise ``kind``.

        Args:
            what: was called.
            function: is called with ``args``.
            accepted: the sentence for when it doesn't raise.
            remedy: what to raise.
            kind: the error that is right.

        Returns:
            The error that was raised.
        """
        try:
            function(*args)
        except kind as error:
            if isinstance(error, PluginError) and kind is not PluginError:
                raise PluginError(f"{self.where}: {accepted}; {error.what}", why=error.why,
                                  next=remedy) from error
            return error
        except Exception as error:  # whatever a stranger's code raises
            raise self.error(f"{what} raises {raised(error)}", remedy) from error
        raise self.error(accepted, remedy)


def raised(error: Exception) -> str:
    """An exception in one line, with its type."""
    ours = f"{type(error).__name__}: " if isinstance(error, QuantkitError) else ""
    return ours + described(error)


def registered_names(kind: str, thing: object) -> list[str]:
    """The names under which ``thing`` is registered, if it is."""
    table, names = registry(kind), []
    for name in list(table):
        with contextlib.suppress(QuantkitError):
            if table.get(name) is thing:
                names.append(name)
    return names


def check_name(contract: Contract, kind: str, thing: object, name: object) -> None:
    """A name is a word, and the registered one. Raises PluginError."""
    contract.must(isinstance(name, str) and name != "" and name == name.strip() and " " not in name,
                  f"its name is {name!r}, which is no word")
    for registered in registered_names(kind, thing):
        contract.must(registered == name, f"its name is {name!r}, but it is registered as {registered!r}",
                      "give both the same name")


def named_class(kind: object, base: type, noun: str) -> str:
    """The name of a class that is registered. Raises PluginError: it is no subclass of ``base``, or has no
    name."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise PluginError(f"{kind!r} is no {noun}", why=f"it must be a subclass of {base.__module__}."
                                                        f"{base.__name__}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(f"{kind.__name__} has no name",
                          next='name: ClassVar[str] = "…", as it is registered')
    return name


def check_reason(contract: Contract, what: str, reason: object) -> str | None:
    """A reason to refuse, or ``None``. Raises PluginError for anything else."""
    contract.must(reason is None or (isinstance(reason, str) and reason.strip() != ""),
                  f"{what} returned {reason!r:.80}; it must be the reason as a sentence, or None")
    assert reason is None or isinstance(reason, str)
    return reason


@contextlib.contextmanager
def global_generators(contract: Contract) -> Iterator[None]:
    """What runs inside may neither draw from a global random generator nor seed one; they are as before
    afterwards."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    try:
        yield
        contract.must(torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
                      and _same_state(before[2], np.random.get_state(legacy=False)),
                      "it used the global random generator",
                      "use torch.Generator().manual_seed(…) of its own")
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def _same_state(first: Any, second: Any) -> bool:
    return repr(first) == repr(second) and np.array_equal(first["state"]["key"], second["state"]["key"])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch uses ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory of torch is filled with NaN inside: an element that nobody writes is seen."""
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(),
              torch.is_deterministic_algorithms_warn_only_enabled(), memory.fill_uninitialized_memory)
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = before[2]


@contextlib.contextmanager
def offline(contract: Contract, what: str) -> Iterator[None]:
    """Neither a connection nor a process can be made inside. Raises PluginError if one is tried."""
    def refused(*args: Any, **named: Any) -> Any:
        tried.append(True)
        raise OSError("there is no network here")

    tried: list[bool] = []
    with mock.patch.object(socket.socket, "connect", refused), \
            mock.patch.object(socket, "getaddrinfo", refused), \
            mock.patch.object(subprocess, "Popen", refused):
        yield
    contract.must(not tried, f"{what} opened a connection or started a process")


def same_tensors(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names, dtypes, shapes and bits."""
    return first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal dtypes, shapes and bytes; NaN equals NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                         for tensor in (first, second)))


def shares_memory(tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> bool:
    """Whether writing to ``tensor`` would write to one of the others."""
    own_storage = tensor.untyped_storage().data_ptr()
    return own_storage != 0 and any(other.untyped_storage().data_ptr() == own_storage
                                    for other in others.values())
