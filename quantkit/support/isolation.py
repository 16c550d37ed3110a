"""Runs functions in a separate process under hard limits of time and memory.

What strangers wrote (a chat template, a regular expression, a parquet file) can make a single operation of a
library run for hours or take all memory, and no check between operations notices. A process can be ended at
any instant.

Processes are started when they are first needed, take one call after another, and end with the program that
started them: when their input ends, or, busy, at their own alarm. They import only the function's module.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from quantkit.support.errors import QuantkitError

MAX_PROCESSES = 4
"""That work at once; further calls wait."""
START_SECONDS = 60.0
"""For a process to start; a tenth of a second is usual."""
MAX_REPLY = 256 * 2**20
"""Bytes of an answer."""
_ALARM_AFTER = 1.0
"""Seconds past the limit after which a process ends itself, should its parent no longer be there to do it."""
_START = ("import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given[0]; "
          "from quantkit.support.isolation import main; main(*given[1:])")
_ENVIRONMENT = ("LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR",
                "TZ")
"""What a process sees of the environment: no tokens and no keys."""

_slots, _lock = threading.BoundedSemaphore(MAX_PROCESSES), threading.Lock()
_idle: dict[tuple[str, int], list[_Process]] = {}


class LimitError(Exception):
    """A call was stopped: it took too long, or its process died. The message goes on after "it"."""


class RaisedError(Exception):
    """The function raised an exception; the message is its type and text."""


def call(function: str, arguments: dict[str, Any], *, seconds: float, memory: int,
         keep: bool = True) -> Any:
    """Call a function in another process. Any thread may.

    Args:
        function: ``package.module:name``; its arguments and its result are JSON, in which half a
            surrogate pair is allowed.
        arguments: its arguments, by name.
        seconds: the limit of wall-clock time, from when the process has the arguments.
        memory: bytes of address space, where the system has such a limit.
        keep: whether the process stays for the next call.

    Returns:
        What it returned.

    Raises:
        LimitError: it was stopped.
        RaisedError: it raised an exception.
        QuantkitError: no process can be started.
    """
    key = (function.partition(":")[0], memory)
    with _slots:
        process = _take(key)
        process.wait()
        try:
            answer = process.ask({"function": function, "arguments": arguments, "seconds": seconds}, seconds)
        except BaseException:  # an interruption too: an answer that is still to come belongs to nobody
            process.end()
            raise
        if keep:
            with _lock:
                _idle.setdefault(key, []).append(process)
        else:
            process.end()
    if "raised" in answer:
        raise RaisedError(answer["raised"])
    return answer["value"]


def start(module: str, memory: int) -> None:
    """Start a process for a module's functions now, so that the first :func:`call` doesn't wait for it.
    Returns at once; what goes wrong is told by that call.

    Args:
        module: the module, ``package.module``.
        memory: the limit that the call will give.
    """
    with contextlib.suppress(QuantkitError), _lock:
        if not _idle.get((module, memory)):
            _idle.setdefault((module, memory), []).append(_Process(module, memory))


class _Process:
    """One process, as its parent sees it."""

    def __init__(self, module: str, memory: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        setup = json.dumps([[root, *(path for path in sys.path if path)], module, memory])
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the parent
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ})
        except OSError as error:
            raise QuantkitError("a process can't be started", why=error.strerror or str(error),
                                next="end other programs, or raise the limit: ulimit -u") from None
        self._module, self._ready = module, False

    def wait(self) -> None:
        """Wait until it can be asked. Raises QuantkitError: it didn't start; it has ended then."""
        if self._ready:
            return
        try:
            self._exchange(None, START_SECONDS)
        except BaseException as error:
            self.end()
            if isinstance(error, LimitError):
                raise QuantkitError("a process for what strangers wrote didn't start",
                                    why=f"python -I -c 'import {self._module}' failed, or took "
                                        f"{START_SECONDS:g} s",
                                    next="check the installation: quantkit doctor") from None
            raise
        self._ready = True

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, return the answer. Raises LimitError; the process has ended then."""
        return self._exchange(_encode(request), seconds)

    def end(self) -> None:
        self._popen.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._popen.wait()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def _exchange(self, message: bytes | None, seconds: float) -> dict[str, Any]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._popen.kill()

        timer = threading.Timer(seconds, stop)  # reading from a pipe has no timeout on every system
        timer.daemon = True
        timer.start()
        line = b""
        try:
            if message is not None:
                self._popen.stdin.write(message)
                self._popen.stdin.flush()
            line = self._popen.stdout.readline(MAX_REPLY)
        except OSError:  # it died while it was told
            pass
        finally:
            timer.cancel()
        if late.is_set() or not line.endswith(b"\n"):  # an answer may come while the process is killed
            raise LimitError(f"takes more than {seconds:g} s" if late.is_set() else
                             "takes more memory than it may, or its process crashed")
        answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return answer


def _take(key: tuple[str, int]) -> _Process:
    with _lock:
        waiting = _idle.get(key, [])
        while waiting:
            if (process := waiting.pop()).alive:
                return process
            process.end()
    return _Process(*key)


def _forget() -> None:
    """In a fork the processes are the parent's, and locks may be held by threads that don't exist."""
    global _slots, _lock, _idle
    _slots = threading.BoundedSemaphore(MAX_PROCESSES)
    _lock = threading.Lock()
    _idle = {}


def _end_all() -> None:
    for processes in _idle.values():
        while processes:
            processes.pop().end()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _encode(message: Any) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def main(module: str, memory: int) -> None:
    """What the process does: answer calls of one module's functions until its input ends."""
    out = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("wb") as nowhere:  # what a library prints is no answer
        os.dup2(nowhere.fileno(), 1)
    importlib.import_module(module)
    _limit(memory)
    _reply(out, _encode({}))
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        _alarm(request["seconds"] + _ALARM_AFTER)
        try:
            name = request["function"].partition(":")[2]
            message = _encode({"value": getattr(sys.modules[module], name)(**request["arguments"])})
        except Exception as error:
            message = _encode({"raised": f"{type(error).__name__}: {error}"[:1000]})
        _alarm(0)
        _reply(out, message)


def _reply(out: IO[bytes], message: bytes) -> None:
    out.write(message)
    out.flush()


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: time is limited there, memory is not
        return
    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _alarm(seconds: float) -> None:
    """Nobody handles the alarm, so that the system ends the process whatever it is at; 0 sets none."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
