"""The server process: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import uvicorn

from quantkit.serving.app import Application
from quantkit.serving.connection import IDLE_SECONDS, Connection

Outcome = Literal["done", "cut", "forced"]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS = 2.0
"""Seconds that answers which were cut off have to say so."""


class Server(uvicorn.Server):
    """Serves until a signal comes, then finishes what was begun.

    The first SIGINT or SIGTERM makes it not ready and lets every answer reach its end, still listening,
    so that whoever asks whether it is ready hears that it isn't; a second one stops at once.

    Args:
        application: The application that answers; it is closed if answers take too long.
        drain_timeout: The seconds that answers have to finish.
        on_ready: This is called when it listens.
        on_drain: This is called at the first signal, with the number of requests under way.

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
        self._application, self._drain_timeout = application, drain_timeout
        self._on_ready, self._on_drain = on_ready, on_drain
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.outcome: Outcome = "done"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def end(self) -> None:
        """What a signal does, from another thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._signalled)

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
        self.outcome = "forced"
        self.force_exit = True
        self.should_exit = True
        self._ending.cancel()
        for connection in list(self.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()

    async def _end(self) -> None:
        self._on_drain(self._application.guard.active)
        if not await self._application.drain(self._drain_timeout):
            self.outcome = "cut"
            await asyncio.to_thread(self._application.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._application.guard.idle(), LAST_WORDS)
        self.should_exit = True
