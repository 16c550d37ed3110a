"""A server's address and the name of a model on it, without what it takes to serve there."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.paths import local_path

MAX_NAME = 200


def model_name(model: str, name: str | None) -> str:
    """What requests call a model: ``name``, or the last part of its path or of its name on the hub.

    Raises:
        UsageError: that can't be a name.
    """
    if name is None:
        path = local_path(model)
        exists = path is not None and path.exists()
        name = path.resolve().name if path and exists else model.rstrip("/").rpartition("/")[2]
        name = name.partition("@")[0] or model
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise UsageError(f"the model can't be called {name[:80]!r}", next="--name NAME",
                         why=f"a name is 1 to {MAX_NAME} printable characters")
    return name


def check_keys(keys: Sequence[str], where: str) -> None:
    """Raise UsageError for keys of which one can't be sent in a header. ``where``: names their place."""
    why = ("it is empty" if not all(keys) or not keys else None if all(
        key.isascii() and key.isprintable() and " " not in key for key in keys) else
        "only letters, digits and signs can be sent")
    if why is not None:
        raise UsageError(f"the API key in {where} can't be used", why=why,
                         next='python -c "import secrets; print(secrets.token_urlsafe())" makes one')


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket on that address. It listens, so that nobody else can take the port; whoever connects waits
    until somebody answers.

    Args:
        host: address or name.
        port: 0 takes a free one.
        has_key: whether clients need a key; without one only loopback addresses are bound.

    Raises:
        UsageError: no such address, or one that others can reach and no key.
        QuantkitError: the port is taken or may not be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the host {host[:80]!r} can't be bound", why=str(error),
                         next="--host 127.0.0.1") from None
    # IPv4 first: what people type into a browser
    family, kind, protocol, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not has_key:
        raise UsageError(f"{host} can be reached from other machines, and there is no API key",
                         why="anybody there could use the model",
                         next="put a key into a file and add --api-key-file FILE, or leave out --host")
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    return listener


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Where to reach it from this machine."""
    address, port = bound.getsockname()[:2]
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        address = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _bind_error(host: str, port: int, error: OSError) -> QuantkitError:
    if error.errno == errno.EADDRINUSE:
        return QuantkitError(f"port {port} of {host} is in use", why="another program listens there",
                             next="add --port 0 to take a free one")
    if error.errno == errno.EACCES:
        return QuantkitError(f"port {port} of {host} may not be used", why=error.strerror,
                             next="add --port 8000, or any other above 1023")
    return QuantkitError(f"{host}:{port} can't be bound", why=error.strerror or str(error),
                         next="--host 127.0.0.1 --port 8000")
