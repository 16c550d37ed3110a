"""Calls in a process of their own: they end in time, and so does the process."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quantkit.support import isolation
from quantkit.support.errors import QuantkitError
from quantkit.support.isolation import LimitError, RaisedError, call

MEMORY = 2**30
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def pid_of(module):
    return call(f"{module}:getpid", {}, seconds=5, memory=MEMORY)


def alive(pid):
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"  # one that nobody has waited for is as good as gone
    except OSError:
        return False


def gone(pid, seconds):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_a_process_takes_one_call_after_another():
    first = pid_of("os")
    assert first != os.getpid() and pid_of("os") == first
    assert call("html:escape", {"s": "<\ud800\n>"}, seconds=5, memory=MEMORY) == "&lt;\ud800\n&gt;"


def test_what_hangs_is_ended_at_its_limit():
    begin = time.monotonic()
    with pytest.raises(LimitError, match=r"more than 0\.5 s"):
        call("signal:pause", {}, seconds=0.5, memory=MEMORY)
    assert time.monotonic() - begin < 30


def test_what_crashes_takes_nobody_with_it():
    before = pid_of("os")
    with pytest.raises(LimitError, match="crashed"):
        call("os:abort", {}, seconds=5, memory=MEMORY)
    assert pid_of("os") != before


def test_an_exception_has_its_type_and_text():
    with pytest.raises(RaisedError, match="AttributeError: 'int'"):
        call("html:escape", {"s": 3}, seconds=5, memory=MEMORY)
    with pytest.raises(RaisedError, match="MemoryError"):
        call("random:randbytes", {"n": 2**27}, seconds=20, memory=2**27)
    with pytest.raises(RaisedError, match="not JSON serializable"):
        call("random:randbytes", {"n": 3}, seconds=5, memory=MEMORY)


def test_secrets_of_the_environment_stay_here(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert call("os:getenv", {"key": "HF_TOKEN"}, seconds=5, memory=MEMORY + 1) is None
    assert call("os:getenv", {"key": "PATH"}, seconds=5, memory=MEMORY + 1) == os.environ["PATH"]


def test_many_threads():
    found, failed = [], []

    def work(number):
        try:
            found.append(call("html:escape", {"s": str(number)}, seconds=60, memory=MEMORY))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sorted(map(int, found)) == list(range(40))
    assert sum(map(len, isolation._idle.values())) <= 4 * isolation.MAX_PROCESSES


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM, None])
def test_it_ends_with_its_parent(way):
    """Killed, ended or done; idle or in the middle of a call."""
    code = """
import sys, threading, time
from quantkit.support.isolation import call
print(call("os:getpid", {}, seconds=5, memory=2**30), flush=True)
threading.Thread(target=call, args=("signal:pause", {}), kwargs={"seconds": 3, "memory": 2**30},
                 daemon=True).start()
time.sleep(1)
from quantkit.support import isolation
import os
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(*children, flush=True)
if sys.argv[1:]:
    time.sleep(600)
"""
    argv = [sys.executable, "-c", code, *(["wait"] if way else [])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        idle = int(parent.stdout.readline())
        children = [int(pid) for pid in parent.stdout.readline().split()]
        if way:
            parent.send_signal(way)
        parent.wait(30)
    assert all(gone(pid, 30) for pid in (idle, *children))


def test_a_fork_has_processes_of_its_own():
    first = pid_of("os")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, str(pid_of("os")).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    other = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    assert other != first and pid_of("os") == first


def test_a_process_that_was_started_before_is_the_one_that_answers():
    memory = MEMORY + 4096  # no other test's
    for _ in range(2):  # the second time there is one already
        isolation.start("json", memory)
        (started,) = isolation._idle["json", memory]
        assert call("json:loads", {"s": "[1]"}, seconds=20, memory=memory) == [1]
        assert isolation._idle["json", memory] == [started]


def test_a_process_that_could_not_start_is_told_by_the_call():
    isolation.start("quantkit.no_such_module", MEMORY)
    with pytest.raises(QuantkitError, match="didn't start"):
        call("quantkit.no_such_module:f", {}, seconds=5, memory=MEMORY)
