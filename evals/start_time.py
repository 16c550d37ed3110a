"""Seconds from a command to its first token: ``python evals/start_time.py MODEL [MODEL …]``.

For each model it starts ``quantkit serve-local MODEL --port 0 --json``, waits for the line on stdout that
says where it listens, and sends one streamed chat request. It prints when the process listened, when the
first token came, and the processor time that the server had taken by then, which says more than the clock
where other programs use the cores. The first run warms the page cache and the cache of compiled kernels, and
isn't counted. Models without a chat template are asked to complete a text.

``--phases`` prints how long imports take, then runs the same inside of this script and prints how long each
other part took.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TICKS = os.sysconf("SC_CLK_TCK")
PHASES = {
    "tokenizer": "quantkit.models.loadable:Tokenizer.__init__",
    "look for damage": "quantkit.runtime.loader:check_sample",
    "build the model": "quantkit.runtime.loader:build_model",
    "make the engine": "quantkit.runtime.engine:Engine.__init__",
    "make the program": "quantkit.runtime.cpu.model:CpuModel.program",
    "prepare the tokenizer": "quantkit.text.tokenizer:Tokenizer.prepare",
    "steps": "quantkit.runtime.engine:Engine.step",
}
"""What is timed inside, ``module:name``; where one calls another, both count it."""
MODULES = ("torch", "pydantic", "fastapi", "uvicorn", "numpy", "llvmlite.binding", "tokenizers",
           "quantkit.plugins.manager", "quantkit.runtime.engine", "quantkit.runtime.loader",
           "quantkit.serving.app")


COMMAND = ("-m", "quantkit.cli.main", "serve-local", "--port", "0", "--json")
IMPORT = re.compile(r"import time: +\d+ \| +(\d+) \| +(\S+)")
# an installed package has its modules compiled, so a checkout may keep them too
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Start(NamedTuple):
    """Seconds since the command, and the processor time of the server by then."""

    listening: float
    first_token: float
    processor: float


def processor_seconds(pid: int) -> float:
    """User and system time of a process with those children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def first_token(url: str, model: str) -> None:
    """Ask for an answer as a stream, and read until its first text."""
    where = urlsplit(url)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, what in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "Hello"})):
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
        try:
            connection.request("POST", path, json.dumps({"model": model, "stream": True, "max_tokens": 4,
                                                         **what}), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                for line in answer:
                    if line.startswith(b"data: {") and _text(json.loads(line[6:])["choices"]):
                        return
        finally:
            connection.close()
    raise RuntimeError(f"{url} didn't answer: {answer.status}")


def _text(choices: list[dict[str, Any]]) -> str:
    choice = choices[0] if choices else {}
    return str(choice.get("delta", choice).get("content") or choice.get("text") or "")


def measure(model: str, options: list[str]) -> Start:
    """Start a server, ask it, end it."""
    begin = time.perf_counter()
    server = subprocess.Popen([sys.executable, *COMMAND, model, *options], env=ENVIRONMENT,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        listening = time.perf_counter() - begin
        first_token(told["url"], told["model"])
        return Start(listening, time.perf_counter() - begin, processor_seconds(server.pid))
    finally:
        server.terminate()
        server.wait()


def show_imports(model: str, options: list[str]) -> None:
    """Print what the first import of each of :data:`MODULES` takes, with all that it imports. That is written
    down as it happens, which makes it about a third slower."""
    with subprocess.Popen([sys.executable, "-X", "importtime", *COMMAND, model, *options], text=True,
                          env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if "listening on" in line:
                server.terminate()
            elif (hit := IMPORT.match(line)) and hit[2] in MODULES:
                print(f"  import {hit[2]:25} {int(hit[1]) / 1e6:7.3f} s")


def show_phases(model: str, options: list[str]) -> None:
    """Run the command in this process and print what its parts took."""
    seconds: dict[str, float] = {}
    begin = time.perf_counter()
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command does before torch is imported

    def wrap(label: str, place: str) -> None:
        module, _, path = place.partition(":")
        *outer, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)

    from quantkit.cli import serve_local
    from quantkit.cli.main import main

    for label, place in PHASES.items():
        wrap(label, place)
    seconds["all imports"] = time.perf_counter() - begin

    def announced(told: dict[str, Any]) -> None:
        seconds["listening"] = time.perf_counter() - begin

        def ask() -> None:
            first_token(told["url"], told["model"])
            seconds["first token"] = time.perf_counter() - begin
            for label, took in seconds.items():
                print(f"  {label:32} {took:7.3f} s")
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask).start()

    serve_local._announce = announced
    sys.argv = ["quantkit", *COMMAND[2:], model, *options]
    with contextlib.suppress(SystemExit):
        main()


def main() -> None:
    """Measure every model and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each model")
    parser.add_argument("--phases", action="store_true", help="print how long each part takes instead")
    parser.add_argument("--option", action="append", default=[], help="of serve-local; may be repeated")
    arguments = parser.parse_args()
    for model in arguments.models:
        if arguments.phases:
            print(model)
            show_imports(model, arguments.option)
            show_phases(model, arguments.option)
            continue
        starts = [measure(model, arguments.option) for _ in range(arguments.runs + 1)][1:]
        listening, first, processor = (median(column) for column in zip(*starts))
        print(f"{model}: listening {listening:.2f} s, first token {first:.2f} s "
              f"({min(s.first_token for s in starts):.2f} to {max(s.first_token for s in starts):.2f}), "
              f"processor time {processor:.2f} s; medians of {len(starts)}", flush=True)


if __name__ == "__main__":
    main()
