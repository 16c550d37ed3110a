"""A peer in a process of its own, as its parent sees it; :mod:`worker` is the other side."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.evaluation.peers.base import PeerFacts, PeerPrediction, PeerSession, PeerTimes
from quantkit.support.errors import QuantkitError

SECONDS = 3600.0
"""For one answer: opening a model, a window, all timed runs. A process that is stuck is ended then."""
MAX_LINE = 2**24
"""Bytes of an answer without its logits."""
MAX_VOCAB = 2**21
"""Columns of logits that are believed."""
FOLDER = Path(__file__).parent


class WorkerSession(PeerSession):
    """A model that another tool opened in a process.

    Args:
        tool: for messages: ``transformers``.
        python: the interpreter that has the tool.
        backend: a file beside this one.
        options: for its ``open_model``.
        hint: what to do if it can't be opened.

    Raises:
        QuantkitError: the interpreter doesn't start, or the model can't be opened.
    """

    def __init__(self, tool: str, python: str, backend: str, options: dict[str, Any], hint: str) -> None:
        self._tool = tool
        try:
            # -I: neither the folder that the user is in nor quantkit's own path gives modules to it
            self._popen = subprocess.Popen(
                [python, "-I", str(FOLDER / "worker.py"), str(FOLDER / backend)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        except OSError as error:
            raise QuantkitError(f"{tool} can't be started", why=f"{python}: {error.strerror or error}",
                                next=hint) from None
        self._words: deque[bytes] = deque(maxlen=20)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.facts = PeerFacts(**self._ask({"do": "open", **options}, hint))
        except BaseException:
            self.close()
            raise

    def encode(self, text: str) -> list[int] | None:
        """Ids by the tool's tokenizer."""
        ids: list[int] | None = self._ask({"do": "encode", "text": text})["ids"]
        return ids

    def predict(self, ids: Sequence[int], prompt: int) -> PeerPrediction:
        """All logits."""
        answer = self._ask({"do": "logits", "ids": list(ids), "skip": prompt})
        rows, vocab, size = len(ids) - 1 - prompt, answer["vocab"], answer["bytes"]
        if answer["rows"] != rows or not 0 < vocab <= MAX_VOCAB or size != rows * vocab * 4:
            raise QuantkitError(f"{self._tool} gives logits of another shape",
                                why=f"{answer['rows']} rows of {vocab} in {size} bytes, not {rows} rows")
        assert self._popen.stdout is not None
        with self._deadline():
            values = bytearray(self._popen.stdout.read(size))
        if len(values) != size:
            raise self._ended()
        return PeerPrediction(torch.frombuffer(values, dtype=torch.float32).reshape(rows, vocab))

    def time(self, prompts: Sequence[Sequence[int]], decode: int) -> PeerTimes:
        """In the tool's process, which has done nothing before if this is called first."""
        answer = self._ask({"do": "time", "prompts": [list(ids) for ids in prompts], "decode": decode})
        return PeerTimes(prefill_tok_s=tuple(answer["prefill_tok_s"]),
                         decode_tok_s=tuple(answer["decode_tok_s"]),
                         first_token_s=tuple(answer["first_token_s"]), peak_bytes=answer["peak_bytes"])

    def close(self) -> None:
        """End the process."""
        self._popen.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._popen.wait()

    def _listen(self) -> None:
        """Keep the last words that it says beside its answers."""
        assert self._popen.stderr is not None
        with self._popen.stderr as words:
            while line := words.readline(4096):
                self._words.append(line)

    def _ask(self, request: dict[str, Any], hint: str | None = None) -> dict[str, Any]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        line = b""
        with self._deadline(), contextlib.suppress(OSError):  # it may have died, which no answer tells
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise self._ended(hint)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            words = self._last_words() if hint else ""  # what is wrong with a model is told beside the error
            raise QuantkitError(f"{self._tool} failed", next=hint, why=_short(answer["error"]) + (
                f" It last said: {words}" if words else ""))
        return answer

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        timer = threading.Timer(SECONDS, self._popen.kill)  # reading from a pipe has no timeout everywhere
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _ended(self, hint: str | None = None) -> QuantkitError:
        """Why there is no answer."""
        code = self._popen.wait()
        self._listener.join(1)
        words = self._last_words()
        why = "its process was ended by signal" if code < 0 else "its process ended with code"
        why += f" {abs(code)}"
        return QuantkitError(f"{self._tool} failed", why=f"{why}: {words}" if words else why, next=hint)

    def _last_words(self) -> str:
        lines = b"".join(self._words).decode(errors="replace").strip().splitlines()
        return _short(lines[-1]) if lines else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:400]
