"""Reads HTTP/1.1 requests as h11 does, but strictly: what two readers could take for different requests is
refused (RFC 9112), and what is many small parts costs no more than it should."""

from __future__ import annotations

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

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
