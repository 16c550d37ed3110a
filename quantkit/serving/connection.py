"""Timeouts of one connection: for a request, for reading an answer, and for being idle."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quantkit.serving.errors import ApiError
from quantkit.serving.framing import MAX_HEAD, FramingError, RequestReader

REQUEST_SECONDS = 20.0
"""From the connection's beginning, or the end of the last answer, until a request's headers are complete."""
WRITE_SECONDS = 60.0
"""For a client to read on, once it has left an answer unread."""
LINGER_SECONDS = 2.0
"""For what is written to arrive, once the connection is to be closed."""
IDLE_SECONDS = 5
"""Without a byte after an answer."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with the time limits it lacks.

    By itself it ends when nothing follows an answer, but waits for ever for headers that trickle in and for
    a client that doesn't read. What isn't HTTP is refused in the shape of all errors.
    """

    _waiting: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: RequestReader = RequestReader()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came, or drop it behind a request that was refused."""
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        """Read what came; with a request's headers the wait for it ends."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request, also if the last one's body trickles in still."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client doesn't read."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what isn't HTTP, or isn't read."""
        error = self.conn.error
        status = 400 if error is None else error.error_status_hint
        why = str(error) if isinstance(error, FramingError) else _REASONS.get(
            status, "the request is not valid HTTP")
        self._refuse(ApiError(status, why, code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        """End a connection without a request."""
        super().timeout_keep_alive_handler()
        self._linger()

    def shutdown(self) -> None:
        """End with the server: after the answer that is under way, if there is one."""
        super().shutdown()
        if self.transport.is_closing():
            self._linger()

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(REQUEST_SECONDS, self._waited)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _waited(self) -> None:
        begun, _ = self.conn.trailing_data
        if begun and self.conn.our_state is h11.IDLE:
            self._refuse(ApiError(408, f"the headers didn't come within {REQUEST_SECONDS:g} seconds",
                                  code="timeout"))
        else:
            self.transport.close()
            self._linger()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and end the connection."""
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            events: tuple[Any, ...] = (h11.Response(status_code=error.status_code, headers=headers),
                                       h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self._refused = True
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:  # nobody hears its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            # closing at once, while the client sends, would reset the connection before the answer is read
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()
        self._linger()

    def _linger(self) -> None:
        # closing waits until everything is written, which a client that doesn't read can put off for ever
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)


_REASONS = {431: f"the headers are larger than {MAX_HEAD} bytes",
            501: "a body comes as it is or in chunks; no other Transfer-Encoding is supported"}
"""Why h11 refused a request, by the status that it suggests."""
