"""What a server needs beside its weights, made ready in threads while they are loaded."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from quantkit.cli.imports import import_large

if TYPE_CHECKING:
    from quantkit.runtime.engine import Engine
    from quantkit.text.tokenizer import Tokenizer


class ServingStart:
    """Begin it as early as possible, but after the runtime is imported: two threads that import the same
    modules would wait for each other.

    It is a context manager. At the end of its block all of it is done, or what went wrong first is raised.
    After an error nothing more is begun, and nothing is waited for.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "start")
        # what goes wrong is raised by whoever imports it next
        self._import = self._threads.submit(import_large, "quantkit.serving.app")
        self._work: list[Future[None]] = []

    def take_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Work out what the first conversation would otherwise wait for."""
        self._work.append(self._threads.submit(tokenizer.prepare))

    def take_engine(self, engine: Engine) -> None:
        """Load the machine code of the kernels that run a model, or compile it."""
        self._work.append(self._threads.submit(_load_program, engine))

    def __enter__(self) -> ServingStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for work in as_completed(self._work):
                    work.result()
                self._import.exception()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _load_program(engine: Engine) -> None:
    from quantkit.runtime.cpu.model import CpuModel, codecs_of, has_kernels

    model = engine.loaded.model
    if isinstance(model, CpuModel) and model.reason_against(engine.cache) is None:
        model.program(codecs_of(engine.cache), not has_kernels(engine.cache))
