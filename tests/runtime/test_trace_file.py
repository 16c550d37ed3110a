"""The file for Perfetto: JSON whose spans lie beside each other, complete however long it is."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from quantkit.runtime import trace_file
from quantkit.runtime.core import RequestLabel
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.trace import Trace
from quantkit.runtime.trace_file import TraceFile
from quantkit.support.errors import QuantkitError, UsageError

ANSWER = Sampling(max_tokens=20, ignore_eos=True)


def events_of(path):
    """All events, with what holds for each of them checked."""
    events = json.loads(path.read_text())
    threads = defaultdict(list)
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys() and event["ph"] in "MXiC"
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        assert all(start <= end for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    return events


def names(events, kind):
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == kind}


def test_what_two_models_did(loaded, small, prompt_of, tmp_path):
    engines = [Engine(loaded), Engine(small)]
    with TraceFile(tmp_path / "trace.json") as file:
        for name, engine in zip(("first", "second"), engines):
            file.add(name, engine)
            for choice in range(2):
                engine.submit(prompt_of(30, choice), ANSWER, label=RequestLabel("answer", choice))
            engine.submit(prompt_of(30, 2), ANSWER)
            while engine.step():
                pass
    events = events_of(tmp_path / "trace.json")
    assert names(events, "process_name") == {(1, 0): "first", (2, 0): "second"}
    assert names(events, "thread_name") == {
        (process, thread): name for process in (1, 2) for thread, name in enumerate(
            ("steps of the engine", "answer choice 0", "answer choice 1", "request 2"))}
    for process, engine in enumerate(engines, start=1):
        here = [event for event in events if event["pid"] == process]
        decoded = [event["args"]["tokens"] for event in here if event["name"] == "decode"]
        assert sum(decoded) == engine.stats()["tokens_generated"] == 60
        assert sum(event["name"] == "step" for event in here) == engine.stats()["steps"]
        assert [event["args"]["reason"] for event in here if event["name"] == "end"] == ["length"] * 3
        counters = {event["name"] for event in here if event["ph"] == "C"}
        assert counters == {"decode rows", "prompt tokens", "KV cache bytes"}


def test_a_trace_that_is_longer_than_its_memory(loaded, prompt_of, tmp_path, monkeypatch):
    """The file's thread looks again and again while the engine runs, so that nothing is missing."""
    looked = threading.Semaphore(0)
    read = Trace.read

    def seen(self, since, until):
        spans = read(self, since, until)
        looked.release()
        return spans

    monkeypatch.setattr(Trace, "read", seen)
    monkeypatch.setattr(trace_file, "POLL_SECONDS", 0.0)
    engine = Engine(loaded)
    engine.trace = engine._scheduler._trace = Trace(size=20)
    with TraceFile(tmp_path / "trace.json") as file:
        file.add("tiny", engine)
        engine.submit(prompt_of(30), Sampling(max_tokens=100, ignore_eos=True))
        while engine.step():
            for _ in range(3):  # one look may have been under way
                assert looked.acquire(timeout=60)
            while looked.acquire(blocking=False):
                pass
    assert engine.trace.recorded > 200
    events = events_of(tmp_path / "trace.json")
    assert sum(event["args"]["tokens"] for event in events if event["name"] == "decode") == 100
    assert not any("missing" in event["name"] for event in events)


def test_it_says_what_is_missing(loaded, prompt_of, tmp_path):
    engine = Engine(loaded)
    engine.trace = engine._scheduler._trace = Trace(size=20)
    with TraceFile(tmp_path / "trace.json") as file:
        engine.submit(prompt_of(30), Sampling(max_tokens=100, ignore_eos=True))
        while engine.step():
            pass
        file.add("tiny", engine)
    missing = engine.trace.recorded - 20
    names = {event["name"] for event in events_of(tmp_path / "trace.json")}
    assert f"{missing} spans are missing" in names


def test_generate_writes_one(loaded, prompt_of, tmp_path):
    with TraceFile(tmp_path / "trace.json") as file:
        (done,) = generate(loaded, [prompt_of(12)], ANSWER, trace=file)
    events = events_of(tmp_path / "trace.json")
    assert names(events, "process_name") == {(1, 0): loaded.uri}
    decoded = [event["args"]["tokens"] for event in events if event["name"] == "decode"]
    assert sum(decoded) == len(done.token_ids)


def test_an_interruption_leaves_a_whole_file(loaded, prompt_of, tmp_path):
    def interrupt(index, text):
        raise KeyboardInterrupt

    path = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt), TraceFile(path) as file:
        generate(loaded, [prompt_of(12)], ANSWER, interrupt, trace=file)
    assert any(event["name"] == "process_name" for event in events_of(path))


def test_nothing_is_an_array_too(tmp_path):
    with TraceFile(tmp_path / "trace.json"):
        pass
    assert events_of(tmp_path / "trace.json") == []


def test_a_place_that_cant_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="can't be written") as caught, TraceFile(tmp_path / "no" / "t.json"):
        pass
    assert "--trace" in caught.value.next


def test_a_full_disk_is_told_at_the_end(loaded, prompt_of):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full, a disk that is always full")
    with pytest.raises(QuantkitError, match="not complete"), TraceFile(Path("/dev/full")) as file:
        generate(loaded, [prompt_of(12)], ANSWER, trace=file)
