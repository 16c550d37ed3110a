"""Asks one server that the user named: JSON over HTTP(S), with limits, and no redirect is followed."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.strict_json import parse_object

MAX_BODY = 256 * 2**20
"""Bytes of an answer."""
MAX_EVENT = 2**20
"""Bytes of a line of a stream."""
_HINT = "see that the server runs, and at which URL: openai(http://127.0.0.1:8000, model=NAME)"


class RefusedError(Exception):
    """The server doesn't do what was asked: status and its words."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"HTTP {status}: {message}")


class ServerClient:
    """One server.

    Args:
        url: the address that the user wrote; a path ``/v1`` at its end may be left out.
        key_variable: variable of the environment that has the API key; empty: none is sent.
        timeout: seconds that the server may be silent.

    Raises:
        UsageError: it isn't an http(s) URL, or the variable isn't set.
    """

    def __init__(self, url: str, key_variable: str, timeout: float) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"{url!r:.200} is not a URL", why=str(error), next=_HINT) from None
        if parts.scheme not in ("http", "https") or not self._host or parts.username or parts.query:
            raise UsageError(f"{url!r:.200} is not the URL of a server", next=_HINT,
                             why="it is http:// or https://, a host, and perhaps a port and a path")
        self.url = url
        self._secure = parts.scheme == "https"
        self._timeout = timeout
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key_variable:
            if not (key := os.environ.get(key_variable)):
                raise UsageError(f"there is no API key in the variable {key_variable}", next="set it first")
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers; GET without a body.

        Raises:
            RefusedError: it answers with a status of 400 or more.
            QuantkitError: it can't be reached, is silent, or answers nonsense.
        """
        with self._response(path, body) as response:
            raw = response.read(MAX_BODY + 1)
        if len(raw) > MAX_BODY:
            raise QuantkitError(f"{self.url} answers with more than {MAX_BODY >> 20} MiB")
        return parse_object(raw, f"the answer of {self.url}", error=QuantkitError, next=_HINT)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events, each as it comes. Raises as :meth:`ask` does."""
        with self._response(path, body) as response:
            while line := response.readline(MAX_EVENT + 1):
                if len(line) > MAX_EVENT:
                    raise QuantkitError(f"{self.url} sends an event of more than {MAX_EVENT >> 20} MiB")
                name, _, value = line.strip().partition(b":")
                if name == b"data" and value.strip() != b"[DONE]":
                    yield parse_object(value, f"an event of {self.url}", error=QuantkitError, next=_HINT)

    @contextmanager
    def _response(self, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("GET" if body is None else "POST", self._root + path,
                               None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status >= 300:
                raise RefusedError(response.status, _words(response.read(4096)))
            yield response
        except TimeoutError:
            raise QuantkitError(f"{self.url} is silent", why=f"{self._timeout:g} s passed",
                                next=_HINT) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise QuantkitError(f"{self.url} can't be asked", why=why, next=_HINT) from None
        finally:
            connection.close()


def _words(raw: bytes) -> str:
    """What a server says about an error, in one line."""
    text = raw.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join((message if isinstance(message, str) else text).split())[:300]
