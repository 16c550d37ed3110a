"""What the load generator stands on: prompts, a streaming HTTP client, and the process of a server.

The client notes when each event of a stream arrives. It speaks HTTP/1.1 over asyncio's sockets, with one
connection for each request. While a stream runs, it only finds the ends of events and takes the time; JSON is
parsed after the last byte. So it takes little of the cores that it shares with the server, and :class:`Clock`
says how little.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

DOCS = Path(__file__).resolve().parents[2] / "docs"
TASKS = ("Summarize this text in a few sentences.", "Explain this text to a beginner.",
         "List the most important points of this text.", "What would you ask the author of this text?")
SHORT = ("What is the capital of France?", "Write a haiku about rain.", "Explain photosynthesis.",
         "List five prime numbers.", "Who was Ada Lovelace?", "How does a bicycle work?",
         "Translate 'good morning' into German.", "Give me three names for a cat.")
LENGTHS = ((0.35, 0, 0), (0.40, 300, 1500), (0.25, 2000, 5000))
"""Share of requests and the least and the most characters of text in them; about 4 characters are a token."""
LIMIT = 2**24
"""Bytes of a line or a body that are read at most."""


@dataclass
class Response:
    """What came back. Times are of ``time.perf_counter``, in seconds.

    Attributes:
        status: HTTP status, or 0 if the connection failed or was cut; ``error`` says how.
        sent: the time at which the request was written.
        events: the arrival and the bytes of each event of a stream, without ``data: ``.
        body: everything that isn't an event stream.
        ended: the time of the last byte.
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
        arrivals: the times of every event with text.
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


@dataclass(frozen=True)
class PromptRequest:
    """One user's message and how many tokens the answer has."""

    message: str
    max_tokens: int


@cache
def words() -> tuple[str, ...]:
    """All words of the documents' prose, in order: tables and code have more tokens a character."""
    return tuple(word for path in sorted(DOCS.glob("*.md")) if path.name != "cli.md"
                 for line in path.read_text(encoding="utf-8").splitlines()
                 if not line.startswith(("|", "    ", "#", "`")) for word in line.split())


def text(random_: random.Random, characters: int) -> str:
    """A stretch of the documents of about this length, at a place that is drawn."""
    source = words()
    place = random_.randrange(len(source))
    taken = []
    length = 0
    while length < characters:
        taken.append(source[place % len(source)])
        length += len(taken[-1]) + 1
        place += 1
    return " ".join(taken)


def requests(seed: str, count: int, least: int = 32, longest: int = 160) -> list[PromptRequest]:
    """A list that depends on the seed alone.

    Each message begins with words of its own, so that no server can take it from a cache by accident. The
    three kinds of :data:`LENGTHS` are mixed in exact shares, in an order that is drawn.
    """
    random_ = random.Random(seed)
    made = []
    for index in range(count):
        share, bounds = (index + 0.5) / count, LENGTHS[-1]
        for bounds in LENGTHS:
            share -= bounds[0]
            if share < 0:
                break
        salt = f"{random_.choice(words())} {random_.randrange(10**6)}."
        body = text(random_, random_.randint(bounds[1], bounds[2])) if bounds[2] else ""
        message = f"{salt} {random_.choice(TASKS)}\n\n{body}" if body else f"{salt} {random_.choice(SHORT)}"
        made.append(PromptRequest(message, random_.randint(least, longest)))
    random_.shuffle(made)
    return made


def server_process(url: str) -> psutil.Process | None:
    """Who listens there; ``None`` if it is another machine or another user's process."""
    port = urlsplit(url).port or 80
    for process in psutil.process_iter():
        try:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a server so far, in user and system mode."""
    total = 0.0
    for member in family(process):
        try:
            times = member.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def resident(process: psutil.Process) -> int:
    """Bytes in memory; pages that several processes share count for each of them."""
    total = 0
    for member in family(process):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
