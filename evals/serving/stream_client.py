"""A small HTTP client that notes when each event of a stream arrives, for the benchmarks in this folder.

It speaks HTTP/1.1 over asyncio's sockets, with one connection for each request. While a stream runs, it only
finds the ends of events and takes the time; JSON is parsed after the last byte. So it takes little of the
cores that it shares with the server, and :class:`Clock` says how little.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

LIMIT = 2**24
"""Bytes of a line or a body that are read at most."""


@dataclass
class Response:
    """What came back. Times are of ``time.perf_counter``, in seconds.

    Attributes:
        status: HTTP status, or 0 if the connection failed or was cut; ``error`` says how.
        sent: when the request was written.
        events: of a stream, the arrival and the bytes of each event, without ``data: ``.
        body: everything that isn't an event stream.
        ended: when the last byte came.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    sent: float = 0.0
    ended: float = 0.0
    error: str = ""

    def json(self) -> Any:
        """The body. Raises ValueError where it isn't JSON."""
        return json.loads(self.body)

    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """The events that hold JSON. Raises ValueError for one that isn't JSON."""
        return [(at, json.loads(data)) for at, data in self.events if data != b"[DONE]"]


@dataclass(frozen=True)
class StreamTimes:
    """A stream that ended well.

    Attributes:
        first: seconds from the request to the first event with text.
        arrivals: of every event with text.
        tokens: by the usage that the server reported, or the number of events with text.
        cached: prompt tokens that the server says it took from a cache, or ``None``.
    """

    first: float
    arrivals: list[float]
    tokens: int
    prompt_tokens: int
    cached: int | None
    text: str

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


def piece(choice: Mapping[str, Any]) -> str:
    """The text of a chunk's choice: of a chat, its reasoning too, or of a completion."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def stream_times(response: Response) -> StreamTimes:
    """Raises RuntimeError if the stream failed, was cut or has no text."""
    if response.status != 200 or response.error:
        raise RuntimeError(f"status {response.status}: {response.error or response.body[:300]!r}")
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    text = ""
    for at, chunk in response.chunks():
        if "error" in chunk:
            raise RuntimeError(f"the stream failed: {chunk['error']}")
        usage = chunk.get("usage") or usage
        timings = chunk.get("timings") or timings  # llama-server's
        new = "".join(piece(choice) for choice in chunk.get("choices", ()))
        if new:
            arrivals.append(at)
            text += new
    if not arrivals:
        raise RuntimeError("the stream has no text")
    details = usage.get("prompt_tokens_details") or {}
    return StreamTimes(arrivals[0] - response.sent, arrivals, usage.get("completion_tokens") or len(arrivals),
                       usage.get("prompt_tokens") or 0, details.get("cached_tokens", timings.get("cache_n")),
                       text)


async def send(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = 600.0,
               leave_after: int | None = None, into: Response | None = None) -> Response:
    """Send one request, POST where there is a body.

    Args:
        into: is filled while the answer comes, so that another task can watch it.
        leave_after: close the connection after this many events; 0: as soon as the request is sent.
    """
    response = Response() if into is None else into
    response.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await _exchange(response, url, path, body, leave_after)
    except TimeoutError:
        response.error = f"no end within {timeout:g} s"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        response.error = f"{type(error).__name__}: {error}"
    response.ended = time.perf_counter()
    return response


async def _exchange(response: Response, url: str, path: str, body: Mapping[str, Any] | None,
                    leave_after: int | None) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=LIMIT)
    try:
        raw = b"" if body is None else json.dumps(body).encode()
        head = (f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
                f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n")
        writer.write(head.encode() + raw)
        await writer.drain()
        if leave_after == 0:
            await asyncio.sleep(0.05)  # so that the server has read it
            return
        status = (await reader.readuntil(b"\r\n")).split(maxsplit=2)
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            response.headers[name.strip().lower()] = value.strip()
        response.status = int(status[1])
        streams = response.headers.get("content-type", "").startswith("text/event-stream")
        rest = b""
        async for block in _blocks(reader, response.headers):
            if not streams:
                response.body += block
                continue
            now = time.perf_counter()
            *events, rest = (rest + block).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line.startswith(b"data:"):
                        response.events.append((now, line[5:].strip()))
            if leave_after is not None and len(response.events) >= leave_after:
                return
        if rest.strip():
            raise ValueError(f"the stream ends within an event: {rest[:100]!r}")
    finally:
        writer.close()


async def _blocks(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> Any:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while block := await reader.read(65536):
            yield block


def model_of(url: str) -> str:
    """The name of the first model that a server lists. Raises OSError if the server isn't there."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


class Clock:
    """Wall time, and the share of a core that this process, the client, took."""

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = (time.process_time() - self._cpu) / self.wall


def quantile(values: list[float], part: float) -> float:
    """The value that this part of all values doesn't exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def named(urls: list[str]) -> dict[str, str]:
    """``NAME=URL`` or ``URL`` → a name and a URL without ``/v1`` and a slash at its end."""
    servers = {}
    for text in urls:
        name, sep, url = text.partition("=")
        url = (url if sep else text).rstrip("/").removesuffix("/v1")
        servers[name if sep else urlsplit(url).netloc] = url
    return servers
