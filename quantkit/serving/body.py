"""Checks bodies before they are parsed, because a parser blocks the event loop until it is done."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from quantkit.serving.errors import ApiError
from quantkit.serving.ignored import HEADER, IGNORED, Ignored, header

MAX_CONTAINERS = 2**14
"""Lists and objects in a body. A million of them, which 4 MiB can hold, take seconds to read."""
EMBEDDED = frozenset({"arguments", "guided_json", "json"})
"""Keys whose value may be JSON written as a text: of tool calls, and of schemas."""


class BodyRoute(APIRoute):
    """A route whose body is checked first, and whose answer names what of the body was ignored.

    The application's state says whether it is strict (``strict_requests``), and where the log is
    (``ignored_log``).
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """What FastAPI makes, behind the check."""
        handle: Any = super().get_route_handler()

        async def checked(request: Request) -> Response:
            ignored = Ignored(request.app.state.strict_requests)
            token = IGNORED.set(ignored)
            try:
                body = await request.body()
                check_structure(body)
                if _brackets(body) + body.count(b"\\u00") > MAX_CONTAINERS:
                    with contextlib.suppress(ValueError, RecursionError):  # the framework says what is wrong
                        check_embedded(await request.json())  # it parses no second time
                answer: Response = await handle(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            finally:
                IGNORED.reset(token)
            if ignored and (names := ignored.names(await request.json())):
                answer.headers[HEADER] = header(names)
                if (log := request.app.state.ignored_log) is not None:
                    log.add(request.headers.get("user-agent", ""), names)
            return answer

        return checked


def check_structure(body: bytes) -> None:
    """Raises ApiError: the body isn't UTF-8, or has more lists and objects than anybody needs."""
    # a JSON parser would recognize UTF-16 and UTF-32 by itself, in which no bracket is counted here
    if (encoding := json.detect_encoding(body)) != "utf-8":
        mark = encoding == "utf-8-sig"
        raise ApiError(400, "the body begins with a byte order mark; leave it out" if mark else
                       f"the body is {encoding.upper()[:6]}; send it as UTF-8", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8", code="invalid_json") from None
    if _brackets(body) > MAX_CONTAINERS and (count := _brackets(_without_texts(body))) > MAX_CONTAINERS:
        raise ApiError(400, f"the body has {count} lists and objects; at most {MAX_CONTAINERS} are read",
                       code="invalid_json")


def check_embedded(value: Any) -> None:
    """Raises ApiError: the texts of a parsed body that are JSON themselves (:data:`EMBEDDED`) have more lists
    and objects than anybody needs, all together."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            for name, text in item.items():
                if name in EMBEDDED and isinstance(text, str):
                    count += text.count("[") + text.count("{")
        if count > MAX_CONTAINERS:
            raise ApiError(400, f"the JSON in texts has more than {MAX_CONTAINERS} lists and objects",
                           code="invalid_json")
        waiting += [part for part in (item.values() if isinstance(item, dict) else item)
                    if isinstance(part, dict | list)] if isinstance(item, dict | list) else []


def _without_texts(body: bytes) -> bytes:
    """What is outside of quotes. Escapes stand only within them."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")
