"""One HTTP/1.1 connection, with timeouts and a strict reader of requests.

The reader is h11's, but what two readers could take for different requests is refused (RFC 9112), and what is
many small parts costs no more than it should.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from quantkit.serving.errors import ApiError

MAX_HEAD = 2**16
"""Bytes of the request line and the headers together."""
MAX_HEADERS = 128
SMALL_CHUNKS, CHUNK_BYTES = 1024, 512
"""A body may come in this number of chunks of any size, and in one more for each of these bytes. Each chunk
takes some microseconds, however small it is."""
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line that ends without a carriage return, or is folded; sections 2.2 and 5.2."""
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)(.*)", re.DOTALL)


class FramingError(h11.RemoteProtocolError):
    """A request that isn't read. Its text is for the client; ``error_status_hint`` is the answer's status."""


class RequestReader(h11.Connection):
    """The server's side of a connection.

    Attributes:
        error: why the last request was refused.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self._receive_buffer = _StrictLines()
        self._chunks = self._bytes = 0
        self.error: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """The next event, as the base class has it; a target in absolute form is one in origin form.

        Raises:
            RemoteProtocolError: what came isn't HTTP; :class:`FramingError` if it is refused all the same.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
                _check(event)
                return _in_origin_form(event)
            if isinstance(event, h11.Data):
                self._bytes += len(event.data)
                self._chunks += event.chunk_start
                if self._chunks > SMALL_CHUNKS + self._bytes // CHUNK_BYTES:
                    raise FramingError("the body comes in chunks that are too small: on average they must "
                                       f"have {CHUNK_BYTES} bytes")
            return event
        except h11.RemoteProtocolError as error:
            self.error = error
            raise


class _StrictLines(ReceiveBuffer):
    """What came and wasn't read yet. h11 takes the lines of headers and trailers from here."""

    _extracted = bytearray()

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Lines up to the first empty one, if it is there.

        Raises:
            FramingError: they are too many or too long, or could be cut into lines in two ways.
        """
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        if len(self._extracted) > MAX_HEAD or len(lines) > MAX_HEADERS:
            raise FramingError(f"the headers are more than {MAX_HEADERS} or larger than {MAX_HEAD} bytes",
                               431)
        if _AMBIGUOUS.search(self._extracted):
            raise FramingError("a header ends without CRLF or is folded")
        return lines


def _check(request: h11.Request) -> None:
    """Raises FramingError: of another version, or how long the body is can be understood in two ways."""
    if not request.http_version.startswith(b"1."):
        raise FramingError("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise FramingError("Transfer-Encoding comes with Content-Length, or in HTTP/1.0")  # sections 6.1, 6.3


def _in_origin_form(request: h11.Request) -> h11.Request:
    """``GET http://host/path`` as ``GET /path`` with that host, whatever the header says; section 3.2.2."""
    if (match := _ABSOLUTE.fullmatch(request.target)) is None:
        return request
    host, target = match.groups()
    headers = [(b"host", host), *((name, value) for name, value in request.headers if name != b"host")]
    return h11.Request(method=request.method, headers=headers, http_version=request.http_version,
                       target=target if target.startswith(b"/") else b"/" + target)


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
