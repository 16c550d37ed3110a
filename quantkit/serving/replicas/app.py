"""The server's application over replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quantkit.serving.app import Application, OnError
from quantkit.serving.guard import GuardMiddleware
from quantkit.serving.ignored import IgnoredLog
from quantkit.serving.replicas.forward import Forwarder
from quantkit.serving.replicas.replica_set import ReplicaSet


def create_replicated_app(replicas: ReplicaSet, *, loopback: bool = True, hosts: Collection[str] = (),
                          keys: Collection[str] = (), on_error: OnError | None = None,
                          on_ignored: Callable[[str], None] | None = None) -> Application:
    """The application over started replicas.

    Args:
        replicas: answer.
        loopback, hosts, keys: who may come in; see :class:`quantkit.serving.guard.GuardMiddleware`.
        on_error: told about errors that are nobody's request's fault.
        on_ignored: told what is ignored in requests: a line for each kind of it and each client.
    """
    forwarder = Forwarder(replicas, on_error, None if on_ignored is None else IgnoredLog(on_ignored))
    guard = GuardMiddleware(forwarder, loopback=loopback, hosts=hosts, keys=keys, on_error=on_error)
    return Application(forwarder, guard, refuse_more=forwarder.close, close=replicas.close)
