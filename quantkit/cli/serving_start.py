"""What a server needs beside its weights, made ready in threads while they are loaded."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quantkit.cli.imports import import_large

if TYPE_CHECKING:
    from quantkit.runtime.engine import Engine
    from quantkit.text.tokenizer import Tokenizer


class ServingStart:
    """Begin it as early as possible, but after the runtime is imported: two threads that import the same
    modules would wait for each other."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "start")
        # what goes wrong is raised by whoever imports it next
        self._threads.submit(import_large, "quantkit.serve.app")
        self._work: list[Future[None]] = []

    def take_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Work out what the first conversation would otherwise wait for."""
        self._work.append(self._threads.submit(tokenizer.prepare))

    def take_engine(self, engine: Engine) -> None:
        """Load the machine code of the kernels that run a model, or compile it."""
        self._work.append(self._threads.submit(_load_program, engine))

    def wait(self) -> None:
        """Until all of it is done. Raises what went wrong."""
        self._threads.shutdown()
        for work in self._work:
            work.result()


def _load_program(engine: Engine) -> None:
    from quantkit.kv.batch import Batch
    from quantkit.runtime.cpu.model import CpuModel, codecs_of, has_kernels

    model = engine.loaded.model
    if isinstance(model, CpuModel) and model.declines(Batch(engine.cache, [])) is None:
        model.program(codecs_of(engine.cache), not has_kernels(engine.cache))
