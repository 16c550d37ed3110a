"""The processes of a test, and where they listen, as Linux's /proc has them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""Addresses of this machine alone, in /proc's hexadecimal."""


def marked(variable: str, value: str) -> list[int]:
    """Processes that have a variable in their environment."""
    out = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{variable}={value}".encode() in (process / "environ").read_bytes().split(b"\x00"):
                out.append(int(process.name))
        except OSError:  # it ended, or is another's
            continue
    return out


def listening(processes: Iterable[int]) -> list[str]:
    """Addresses on which processes listen, in /proc's hexadecimal."""
    sockets = set()
    for process in processes:
        try:
            sockets |= {str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir()}
        except OSError:  # it ended
            continue
    rows = [line.split() for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
