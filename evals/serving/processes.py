"""The process that listens at an address of this machine: its memory and CPU time, its children included."""

from __future__ import annotations

from urllib.parse import urlsplit

import psutil


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
