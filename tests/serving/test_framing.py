"""Requests whose beginning or end two readers could see at different places, or of many small parts."""

import json

import h11
import pytest

from quantkit.serving.connection import (
    CHUNK_BYTES,
    MAX_HEAD,
    MAX_HEADERS,
    SMALL_CHUNKS,
    FramingError,
    RequestReader,
)

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'


def read(*parts):
    """The events of one request that comes in these parts."""
    reader, events = RequestReader(), []
    for part in parts:
        reader.receive_data(part)
        while (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(event)
    return events


REFUSED = {
    "both lengths": (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, 400),
    "both, the other way": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + SMUGGLED, 400),
    "another coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "two codings": (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + SMUGGLED, 501),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
    "almost chunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    "two lengths": (POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n", 400),
    "a list of lengths": (POST + b"Content-Length: 4, 5\r\n\r\n", 400),
    "a signed length": (POST + b"Content-Length: +4\r\n\r\n", 400),
    "two hosts": (GET + b"Host: localhost\r\n\r\n", 400),
    "bare LF": (GET.replace(b"\r\n", b"\n") + b"\n", 400),
    "a bare LF": (GET + b"X: a\nY: b\r\n\r\n", 400),
    "a bare LF at the end": (GET + b"\n", 400),
    "a bare CR": (GET + b"X: a\rb\r\n\r\n", 400),
    "a folded line": (GET + b"X: a\r\n b\r\n\r\n", 400),
    "a folded line by a tab": (GET + b"X: a\r\n\tb\r\n\r\n", 400),
    "space before the colon": (GET + b"X : a\r\n\r\n", 400),
    "NUL": (GET + b"X: a\0b\r\n\r\n", 400),
    "a chunk's size with a sign": (CHUNKED + b"-1\r\n", 400),
    "a chunk's size in Python's way": (CHUNKED + b"1_0\r\n", 400),
    "a chunk's size of 21 digits": (CHUNKED + b"F" * 21 + b"\r\n", 400),
    "a chunk that is longer": (CHUNKED + b"1\r\nabc\r\n", 400),
    "a bare LF behind a chunk's size": (CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n", 400),
    "a bare LF behind the chunks": (CHUNKED + b"0\r\n\nGET /metrics HTTP/1.1\r\n\r\n", 400),
    "a bare LF in the trailers": (CHUNKED + b"0\r\nX: a\n\nGET /metrics HTTP/1.1\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "HTTP/9.9": (GET.replace(b"1.1", b"9.9") + b"\r\n", 505),
    "no HTTP": (b"nonsense\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02", 400),
    "long headers": (GET + b"X: " + b"y" * MAX_HEAD + b"\r\n\r\n", 431),
    "headers that never end": (GET + b"X: " + b"y" * MAX_HEAD, 431),
    "many headers": (GET + b"X: y\r\n" * MAX_HEADERS + b"\r\n", 431),
    "many trailers": (CHUNKED + b"0\r\n" + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_readers_could_read_in_two_ways_is_refused(name):
    raw, status = REFUSED[name]
    for parts in ([raw], [raw[at:at + 1] for at in range(len(raw))] if len(raw) < 500 else [raw]):
        with pytest.raises(h11.RemoteProtocolError) as caught:
            read(*parts)
        assert caught.value.error_status_hint == status


@pytest.mark.parametrize("raw", [
    GET + b"\r\n", GET.replace(b"1.1", b"1.0") + b"\r\n", GET + b"X:  a b\t \r\n\r\n", GET + b"X:\r\n\r\n",
    GET + b"X: y\r\n" * (MAX_HEADERS - 3) + b"\r\n",
    POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nab\nc",
    CHUNKED + b"4\r\na\n\nb\r\n0\r\n\r\n", CHUNKED + b"4;a=b\r\n\n b\n\r\n0\r\nX: y\r\n\r\n",
])
def test_what_is_read_in_one_way_is_read(raw):
    events = read(raw)
    assert isinstance(events[0], h11.Request) and isinstance(events[-1], h11.EndOfMessage)


@pytest.mark.parametrize(("target", "host", "origin_form"), [
    (b"http://localhost/health?a=b", b"localhost", b"/health?a=b"),
    (b"HTTP://localhost:80", b"localhost:80", b"/"), (b"https://localhost?a", b"localhost", b"/?a"),
    (b"http://evil.example/health", b"evil.example", b"/health"), (b"http:///health", b"", b"/health"),
    (b"http://me@localhost/", b"me@localhost", b"/"), (b"/http://evil.example", b"localhost",
                                                     b"/http://evil.example"),
])
def test_a_target_in_absolute_form_names_the_host(target, host, origin_form):
    (request, _) = read(GET.replace(b"/health", target) + b"\r\n")
    assert request.target == origin_form
    assert [value for name, value in request.headers if name == b"host"] == [host]


def test_a_chunk_has_some_hundred_bytes_on_average():
    small = b"1\r\n \r\n"
    read(CHUNKED + small * SMALL_CHUNKS + b"0\r\n\r\n")
    read(CHUNKED, *[b"400\r\n" + b" " * 1024 + b"\r\n"] * 4096, small * 1000, b"0\r\n\r\n")
    for large in (0, 8):
        reader, count = RequestReader(), 0
        reader.receive_data(CHUNKED + b"200\r\n" + b" " * 512 + b"\r\n" + small * 700_000 if large else
                            CHUNKED + small * 700_000)
        with pytest.raises(FramingError, match="too small"):
            while True:
                count += isinstance(reader.next_event(), h11.Data)
        assert count <= SMALL_CHUNKS + 1 + SMALL_CHUNKS // CHUNK_BYTES + bool(large)


@pytest.fixture
def ask(live):
    """``ask(raw, **options)``: what a server answers, as a list of statuses and bodies; each is complete."""
    def send(raw, **options):
        with live(**options).connect() as connection:
            connection.sendall(raw)
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        return [(int(part.split()[0]), json.loads(part.partition(b"\r\n\r\n")[2]))
                for part in answer.split(b"HTTP/1.1 ")[1:]]

    return send


@pytest.mark.parametrize("name", ["both lengths", "chunks in HTTP/1.0", "another coding", "bare LF",
                                  "long headers", "a bare LF in the trailers", "no HTTP", "two hosts"])
def test_what_is_refused_has_an_answer_of_the_usual_shape_and_nothing_follows_it(ask, name):
    raw, status = REFUSED[name]
    ((answered, body),) = ask(raw + GET + b"\r\n")
    assert answered == status and body["error"]["code"] == "invalid_http"
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("options", [{}, {"key": "sesame"}])
def test_a_flood_of_small_chunks_ends_the_connection_whoever_sends_it(ask, monkeypatch, options):
    """The client has its answer even though it hasn't sent all."""
    count, read_event = 0, RequestReader.next_event

    def counted(self):
        nonlocal count
        count += 1
        return read_event(self)

    monkeypatch.setattr(RequestReader, "next_event", counted)
    ((status, _),) = ask(CHUNKED + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n", **options)
    assert status in (400, 401) and (options or status == 400)
    assert count < 2 * SMALL_CHUNKS


def test_a_body_in_some_small_chunks_is_read(ask):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    ((status, body),) = ask(CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + chunks + b"0\r\n\r\n")
    assert status == 200 and body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("target", "host", "status"), [
    (b"http://localhost/health", b"localhost", 200), (b"http://localhost/health", b"evil.example", 200),
    (b"http://evil.example/health", b"localhost", 403),
    (b"http://localhost@evil.example/health", b"localhost", 403),
])
def test_the_host_in_the_target_is_the_one_that_is_checked(ask, target, host, status):
    raw = GET.replace(b"/health", target).replace(b"Host: localhost", b"Host: " + host)
    assert [answered for answered, _ in ask(raw + b"Connection: close\r\n\r\n")] == [status]
