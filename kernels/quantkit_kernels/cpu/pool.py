"""The threads that run programs. They wait in machine code for a moment, then in Python, asleep."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit_kernels.cpu import driver
from quantkit_kernels.cpu.compiled import address
from quantkit_kernels.cpu.isa import PLAIN


class Pool:
    """Runs programs on ``threads`` threads, the caller's among them.

    One program runs at a time; :meth:`run` may be called from any thread.

    Args:
        threads: at most; 0: one a core that this process may use.

    Attributes:
        threads: the number of its threads.

    Raises:
        ValueError: a negative number of threads.
    """

    def __init__(self, threads: int = 0) -> None:
        if threads < 0:
            raise ValueError(f"{threads} threads")
        self.threads = min(threads or cores(), driver.MOST)
        self._lock = threading.Lock()
        self._pid = 0
        if hasattr(os, "register_at_fork"):  # a child may be made while another thread holds it
            os.register_at_fork(after_in_child=functools.partial(_unlock, weakref.ref(self)))

    def run(self, program: npt.NDArray[np.int64]) -> None:
        """Run all operations; returns when they are done.

        Args:
            program: int64 ``[operations, RECORD / 8]``, as :mod:`~quantkit_kernels.cpu.driver` describes.
        """
        with self._lock:
            if self._pid != os.getpid():  # also after a fork, which copies no threads
                self._begin()
            shared = self._shared
            shared[driver.PROGRAM // 8] = program.ctypes.data
            shared[driver.LENGTH // 8] = len(program)
            try:
                self._work_together()
            except BaseException:  # Ctrl-C, somewhere in Python: the others have begun and wait for this one
                if shared[driver.JOB // 8] != shared[driver.FINISHED // 8]:
                    for event in self._wake:
                        event.release()
                    self._run(self._where, 0)
                raise

    def _work_together(self) -> None:
        if self.threads > 1:
            asleep = self._start(self._where)
            for thread in range(1, self.threads):
                if asleep >> thread & 1:
                    self._wake[thread].release()
        self._run(self._where, 0)

    def close(self) -> None:
        """End the threads; the next :meth:`run` begins new ones."""
        with self._lock:
            if self._pid == os.getpid():
                self._closing.set()
                for event in self._wake:
                    event.release()
                for thread in self._members:
                    thread.join()
            self._pid = 0

    def _begin(self) -> None:
        functions = [address(name, PLAIN, emit) for name, emit in (
            ("run", driver.emit_run), ("start", driver.emit_start), ("work", driver.emit_work))]
        kind = ctypes.CFUNCTYPE
        self._run = kind(None, ctypes.c_void_p, ctypes.c_int64)(functions[0])
        self._start = kind(ctypes.c_int64, ctypes.c_void_p)(functions[1])
        work = kind(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(functions[2])
        room = np.zeros((driver.SHARED + 64) // 8, np.int64)
        self._room, self._shared = room, room[(-room.ctypes.data % 64) // 8:]
        self._where: int = self._shared.ctypes.data
        self._shared[driver.YIELD // 8] = _yield_address()
        self._shared[driver.THREADS // 8] = self.threads
        self._wake = [threading.Semaphore(0) for _ in range(self.threads)]
        self._closing = closing = threading.Event()
        self._members = [
            threading.Thread(target=_member, args=(work, room, self._where, wake, closing, thread),
                             daemon=True, name=f"quantkit-cpu-{thread}")
            for thread, wake in enumerate(self._wake) if thread]
        try:
            for member in self._members:
                member.start()
        except RuntimeError:  # no more threads: those that began end
            closing.set()
            for event in self._wake:
                event.release()
            raise
        if self._pid == 0:
            atexit.register(self.close)
        self._pid = os.getpid()


def _member(work: Callable[[int, int, int], int], room: npt.NDArray[np.int64], where: int,
            wake: threading.Semaphore, closing: threading.Event, thread: int) -> None:
    """A thread's life; ``room`` is what ``where`` points into."""
    done = 0
    while not closing.is_set():
        done = work(where, thread, done)
        wake.acquire()


def _unlock(pool: weakref.ref[Pool]) -> None:
    if (threads := pool()) is not None:
        threads._lock = threading.Lock()


def cores() -> int:
    """Cores that this process may use: its affinity, its control group's quota, one for two hyperthreads."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    physical = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            physical.add(siblings.read_text())
        except OSError:
            physical.add(str(cpu))
    count = len(physical)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


def _yield_address() -> int:
    library = ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
    function = library.SwitchToThread if sys.platform == "win32" else library.sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0
