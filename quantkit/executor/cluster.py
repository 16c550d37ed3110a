"""The Ray cluster that work runs on, https://www.ray.io: one that is named, or one of this machine.

A cluster of this machine listens on its loopback address alone, without dashboard or usage statistics. Its
token is made for it and is in no file; its folder is this user's alone and is deleted with it, even if this
process is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from quantkit.support.errors import QuantkitError

LOOPBACK, LOCAL = "127.0.0.1", "local"
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that keeps it to this machine, on every system; read when Ray is imported."""
AUTO_CONNECT = "RAY_ENABLE_AUTO_CONNECT"
"""Ray's variable; with 0 a call after the end starts no cluster anew. Read when Ray is imported."""
AUTHENTICATION = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
FOLDER = "RAY_TMPDIR"
"""Ray's variables for who may use a cluster that is started, and for where its files are."""
CARRIED = ("QUANTKIT_PLUGINS", "QUANTKIT_ISA", "QUANTKIT_TASK_DATA", "GOMP_SPINCOUNT")
"""Variables that workers have as this process has them."""
SWEEP = """cat >/dev/null
for round in 1 2; do
    for process in $({ find /proc/[0-9]*/fd -lname "$1/*"; grep -lF "RAY_TMPDIR=$1" /proc/[0-9]*/environ
            } 2>/dev/null | cut -d/ -f3 | sort -u)
    do [ "$process" = "$2" ] || kill -9 "$process"; done
    sleep 0.3
done
rm -rf -- "$1"
"""
"""Shell script that waits for the end of its input, which comes with the end of the process that started the
cluster, even if that is killed. It ends the processes that have files in the cluster's folder ``$1`` open, or
the folder in their environment (some of Ray's would listen for another half minute), but for ``$2``, the one
that started it, and deletes the folder."""


def named_address() -> str:
    """The address of the cluster that ``RAY_ADDRESS`` names; ``local`` for one that is started here."""
    return os.environ.get("RAY_ADDRESS") or LOCAL


def import_ray(address: str, option: str) -> Any:
    """The package, told to stay on this machine if that is where the cluster at ``address`` is started. The
    first import decides, so that whoever needs Ray imports it here.

    Args:
        address: The address of the cluster.
        option: The option of the command line that needs Ray.

    Raises:
        QuantkitError: it isn't installed.
    """
    if address == LOCAL and "ray" not in sys.modules:
        os.environ.setdefault(ALONE, "0")
        os.environ[AUTHENTICATION] = "token"
    os.environ.setdefault(AUTO_CONNECT, "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise QuantkitError(f"{option} needs Ray", why=str(error), next="pip install ray") from error
    return ray


class Cluster:
    """A connection to a cluster, which is started here if its address says so.

    Args:
        ray: The package, of :func:`import_ray`.
        address: The address of the cluster.
        next: The advice for a user where that fails.
        local: Options of a cluster that is started here.

    Raises:
        QuantkitError: the cluster can't be reached or started.
    """

    def __init__(self, ray: Any, address: str, *, next: str, **local: Any) -> None:
        self._ray = ray
        self._folder = ""
        self._sweeper: subprocess.Popen[bytes] | None = None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
        if address == LOCAL:
            options |= {"include_dashboard": False, **local}
            os.environ.setdefault(TOKEN, secrets.token_hex(32))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if address == LOCAL:
                    with self._private_folder(), interrupt_deferred():
                        ray.init(**options)
                else:
                    ray.init(**options)
            if address == LOCAL and ray.util.get_node_ip_address() != LOOPBACK:
                raise QuantkitError("Ray would listen on the network",
                                    why="it was imported before it could be told to stay on this machine",
                                    next=f"set {ALONE}=0, or start a cluster of your own and set RAY_ADDRESS")
        except BaseException as error:
            self.close()
            if isinstance(error, QuantkitError) or not isinstance(error, Exception):
                raise
            where = "started" if address == LOCAL else f"reached at {address}"
            raise QuantkitError(f"a Ray cluster can't be {where}", why=str(error).strip()[:300] or None,
                                next=next) from error

    def close(self) -> None:
        """Leave the cluster; end it, and delete its folder, if it was started here."""
        self._ray.shutdown()
        if self._sweeper is not None:
            self._sweeper.communicate()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _private_folder(self) -> Iterator[None]:
        """Files of a cluster that is started in the block are in a folder of this user's."""
        # names of sockets in it must be short, which those below macOS's usual temporary folder wouldn't be
        posix = os.name == "posix"
        self._folder = tempfile.mkdtemp(prefix="quantkit-ray-", dir="/tmp" if posix else None)
        before = os.environ.get(FOLDER)
        self._sweeper = subprocess.Popen(
            ["sh", "-c", SWEEP, "sh", self._folder, str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) if posix else None
        os.environ[FOLDER] = self._folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER)
            if before is not None:
                os.environ[FOLDER] = before


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, because Ray, interrupted while it starts processes, forgets some
    of them. A second one doesn't wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are another thread's there
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class WorkerSetup:
    """What a process of the cluster has as the one that started the work has it.

    Attributes:
        threads: The threads that it computes with.
        environment: The variables that it gets.
        path: The entries of its ``sys.path``.
    """

    threads: int
    environment: Mapping[str, str]
    path: Sequence[str]

    @classmethod
    def of_this_process(cls, threads: int) -> WorkerSetup:
        """As this process is, but for its threads."""
        environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
        return cls(threads, environment, list(sys.path))

    def apply(self) -> None:
        """Set this process up so."""
        os.environ.update(self.environment)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        torch.set_num_threads(self.threads)
