"""The server process: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import uvicorn

from quantkit.errors import QuantkitError, UsageError
from quantkit.serve.app import Application
from quantkit.serve.connection import IDLE_SECONDS, Connection

Outcome = Literal["done", "cut", "forced"]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS = 2.0
"""Seconds that answers which were cut off have to say so."""


class Server(uvicorn.Server):
    """Serves until a signal comes, then finishes what was begun.

    The first SIGINT or SIGTERM makes it not ready and lets every answer reach its end, still listening,
    so that whoever asks whether it is ready hears that it isn't; a second one stops at once.

    Args:
        application: what is served; its engines are closed if answers take too long.
        drain_timeout: seconds that answers have to finish.
        on_ready: called when it listens.
        on_drain: called at the first signal.

    Attributes:
        outcome: ``done``; ``cut`` if answers were cut off after ``drain_timeout``; ``forced`` by a
            second signal.
    """

    def __init__(self, application: Application, *, drain_timeout: float,
                 on_ready: Callable[[], None], on_drain: Callable[[int], None]) -> None:
        # one implementation of HTTP and of the loop everywhere; no header of a proxy is believed
        super().__init__(uvicorn.Config(
            application, http=Connection, loop="asyncio", ws="none", lifespan="off", log_config=None,
            log_level="critical", access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=5))
        self._application, self._patience = application, drain_timeout
        self._on_ready, self._on_drain = on_ready, on_drain
        self._ending: asyncio.Task[None] | None = None
        self.outcome: Outcome = "done"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of the base class's, which stops listening first and dies of the signal in the end."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are somebody else's there
            return
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(self._signalled)

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
            return
        self.outcome, self.force_exit, self.should_exit = "forced", True, True
        self._ending.cancel()
        for connection in list(self.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()

    async def _end(self) -> None:
        self._on_drain(self._application.guard.active)
        if not await self._application.drain(self._patience):
            self.outcome = "cut"
            await asyncio.to_thread(self._application.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._application.guard.idle(), LAST_WORDS)
        self.should_exit = True


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket on that address. It listens, so that nobody else can take the port; whoever connects waits
    until somebody answers.

    Args:
        host: address or name.
        port: 0 takes a free one.
        has_key: whether clients need a key; without one only loopback addresses are bound.

    Raises:
        UsageError: no such address, or one that others can reach and no key.
        QuantkitError: the port is taken or may not be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the host {host[:80]!r} can't be bound", why=str(error),
                         next="--host 127.0.0.1") from None
    # IPv4 first: what people type into a browser
    family, kind, protocol, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not has_key:
        raise UsageError(f"{host} can be reached from other machines, and there is no API key",
                         why="anybody there could use the model",
                         next="put a key into a file and add --api-key-file FILE, or leave out --host")
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    return listener


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Where to reach it from this machine."""
    address, port = bound.getsockname()[:2]
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        address = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _bind_error(host: str, port: int, error: OSError) -> QuantkitError:
    if error.errno == errno.EADDRINUSE:
        return QuantkitError(f"port {port} of {host} is in use", why="another program listens there",
                             next="add --port 0 to take a free one")
    if error.errno == errno.EACCES:
        return QuantkitError(f"port {port} of {host} may not be used", why=error.strerror,
                             next="add --port 8000, or any other above 1023")
    return QuantkitError(f"{host}:{port} can't be bound", why=error.strerror or str(error),
                         next="--host 127.0.0.1 --port 8000")
