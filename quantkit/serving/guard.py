"""Who may talk to the server, and how much: checked before anything else sees a request.

A page on the web can make a browser send requests to this machine, under this machine's address or,
by rebinding a name of its own to it, under any other. Such requests carry a foreign ``Origin`` or
``Host`` and are refused.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.serving.errors import RETRY_AFTER, ApiError, api_error

MAX_BODY = 4 * 2**20
BODY_SECONDS = 60.0
"""Within which a body must have come."""
LAST_BODY = 1.0
"""The same, once the server is about to end."""
TENANT = "quantkit.tenant"
"""Key of a scope for whose request it is: a digest of its API key, where clients need one."""
OPEN = frozenset({"/health"})
"""Paths that need no key."""
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"),
           (b"cache-control", b"no-store"), (b"cross-origin-resource-policy", b"same-origin"))


class GuardMiddleware:
    """ASGI middleware: host, origin, key, size and time of the body; and no exception gets past it.

    Args:
        app: The application behind it.
        loopback: Whether the server is bound to this machine only; then every ``Host`` but a loopback
            one is foreign. Otherwise addresses are fine (a rebound name is never an address), names
            must be listed.
        hosts: Further names that are ours.
        keys: Every path but :data:`OPEN` needs one of these: as bearer token, in ``x-api-key``, or as
            password of basic authentication, which is what a browser can do. Clients with different keys
            share no prefix, and none sees another's requests in the trace.
        on_error: This is told about an exception that nobody handled.

    Attributes:
        active: The number of requests under way, each until its answer is complete.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool = True, hosts: Collection[str] = (),
                 keys: Collection[str] = (), on_error: Callable[[BaseException], None] | None = None) -> None:
        self._app = app
        self._loopback = loopback
        self._on_error = on_error
        self._hosts = {_listed(name) for name in hosts} | {"localhost"}
        self._tenants = {key.encode(): hashlib.sha256(b"tenant:" + key.encode()).digest() for key in keys}
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._reading: set[_Measured] = set()
        self._draining = False

    def stop_reading(self) -> None:
        """Refuse every request whose body isn't there yet: it may never come."""
        self._draining = True
        for body in self._reading:
            body.stop()

    async def idle(self) -> None:
        """Returns when no request is under way."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        self.active += 1
        self._idle.clear()
        try:
            await self._http(scope, receive, send)
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                names = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(h for h in HEADERS if h[0] not in names)]
            await send(message)

        body = None
        try:
            self._admit(scope)
            body = _Measured(scope, receive)
            self._reading.add(body)
            if self._draining:
                body.stop()
            await self._app(scope, body, sending)
        except ApiError as error:
            if started:
                raise
            await error.response(scope["path"])(scope, receive, sending)
        except Exception as error:
            if self._on_error is not None:
                self._on_error(error)
            if not started:
                await api_error(error).response(scope["path"])(scope, receive, sending)
        finally:
            self._reading.discard(body)

    def _admit(self, scope: Scope) -> None:
        headers = _headers(scope)
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._ours(authority(host)):
            raise ApiError(403, f"the host {host[:80]!r} is not this server's", code="forbidden_host")
        origin = headers.get(b"origin")
        if origin is not None and not _same_origin(origin.decode("latin-1"), host):
            raise ApiError(403, "requests from other origins are refused", code="forbidden_origin")
        if self._tenants and scope["path"] not in OPEN:
            scope[TENANT] = self._tenant(headers)
        if scope.get(TENANT, b"") is None:
            scheme = "Basic" if scope["path"] == "/" else "Bearer"
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY",
                           code="invalid_api_key", headers={"WWW-Authenticate": f'{scheme} realm="quantkit"'})
        if sum(name == b"content-type" for name, _ in scope["headers"]) > 1:
            raise ApiError(400, "the header Content-Type comes twice", code="invalid_http")

    def _ours(self, host: Authority | None) -> bool:
        if host is None:
            return False
        if host.address is None:
            return host.name in self._hosts
        return host.address.is_loopback or not self._loopback or host.name in self._hosts

    def _tenant(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Whose key it is; ``None``: nobody's."""
        authorization = headers.get(b"authorization", b"")
        scheme = authorization.split(b" ", 1)[0]
        credentials = authorization[len(scheme) + 1:]
        credentials = credentials.strip()
        if not scheme and b"x-api-key" in headers:  # as Anthropic's clients send it
            scheme, credentials = b"bearer", headers[b"x-api-key"].strip()
        if scheme.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif scheme.lower() != b"bearer":
            return None
        owner = None
        for key, tenant in self._tenants.items():  # all of them, whichever it is
            if hmac.compare_digest(credentials, key):
                owner = tenant
        return owner


class _Measured:
    """``receive`` of one request, counting the body as it streams."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._count = 0
        self._more = True
        self._until = asyncio.get_running_loop().time() + BODY_SECONDS
        self._waiting: asyncio.Timeout | None = None
        self._stopped = False
        stated = _headers(scope).get(b"content-length", b"0")
        if not stated.isdigit() or len(stated) > 18 or int(stated) > MAX_BODY:
            raise _too_large()

    async def __call__(self) -> Message:
        if not self._more:  # from here on there is only the client's leaving to wait for
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until) as self._waiting:
                message = await self._receive()
        except TimeoutError:
            if self._stopped:
                raise ApiError(503, "the server is shutting down", code="shutting_down",
                               headers=RETRY_AFTER) from None
            raise ApiError(408, f"the body didn't come within {BODY_SECONDS:g} seconds",
                           code="timeout") from None
        finally:
            self._waiting = None
        self._more = bool(message.get("more_body", False))
        self._count += len(message.get("body", b""))
        if self._count > MAX_BODY:
            raise _too_large()
        return message

    def stop(self) -> None:
        """What hasn't come by now, but for what the next moment brings, isn't waited for."""
        self._stopped, self._until = True, asyncio.get_running_loop().time() + LAST_BODY
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self._until)


def tenant(request: Request) -> bytes:
    """Whose request it is; nothing where clients need no key."""
    return bytes(request.scope.get(TENANT, b""))


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="body_too_large")


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Headers by name. The values of a header that comes twice are joined, so that neither is trusted."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(parts) for name, parts in values.items()}


@dataclass(frozen=True)
class Authority:
    """Who a request is for.

    Attributes:
        name: The name in lower case, without the dot that a full name may end with; an address has its usual
            form.
        address: The address, if the name is one.
        port: The port, if it is said.
    """

    name: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
    port: int | None


def authority(host: str) -> Authority | None:
    """``name:port``, ``1.2.3.4:port`` or ``[::1]:port`` as the header ``Host`` has it; ``None`` if it is
    anything else: a list, a user, a zone, an address as one number."""
    match = _AUTHORITY.fullmatch(host)
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else None
    if port is not None and port > 65535:
        return None
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
    try:
        if match["inside"] is not None:
            address = ipaddress.IPv6Address(match["inside"])
            return Authority(str(address), address.ipv4_mapped or address, port)
        address = ipaddress.IPv4Address(match["name"])
        return Authority(str(address), address, port)
    except ValueError:
        return None if match["inside"] is not None else Authority(_plain(match["name"]), None, port)


_AUTHORITY = re.compile(r"(?:\[(?P<inside>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z_-]+(?:\.[0-9A-Za-z_-]+)*\.?))"
                        r"(?::(?P<port>[0-9]{0,5}))?", re.ASCII)


def _listed(host: str) -> str:
    """A host's name as somebody lists it: an IPv6 address may stand without brackets."""
    address = authority(host) or authority(f"[{host}]")
    return _plain(host) if address is None else address.name


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _same_origin(origin: str, host: str) -> bool:
    """Whether a page of that origin came from this server: over HTTP, or HTTPS if a proxy adds it."""
    scheme, separator, rest = origin.partition("://")
    origin_address, target = authority(rest), authority(host)
    if not separator or scheme not in _PORTS or origin_address is None or target is None:
        return False
    port = _PORTS[scheme]
    return (origin_address.name, origin_address.port or port) == (target.name, target.port or port)


_PORTS = {"http": 80, "https": 443}
