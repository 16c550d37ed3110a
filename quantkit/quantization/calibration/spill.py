"""Hidden states between two passes: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import TracebackType

import torch

from quantkit.quantization.memory import STATES_IN_MEMORY
from quantkit.support.errors import QuantkitError


class Spill:
    """Tensors that are put once and taken once. Use it in a ``with``.

    Args:
        folder: made when the first tensor doesn't fit; removed at the end. What an earlier run left
            there is removed at the beginning. ``None``: memory has room for all.
        limit: the number of bytes kept in memory; :data:`STATES_IN_MEMORY` by default.
    """

    def __init__(self, folder: Path | None, limit: int | None = None) -> None:
        self._folder = folder
        self._left = sys.maxsize if folder is None else STATES_IN_MEMORY if limit is None else limit
        self._in_memory: dict[str, torch.Tensor] = {}
        self._filed: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._remove()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a tensor; the caller must not write to it afterwards. Raises QuantkitError for a full disk."""
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._in_memory[key] = tensor
            return
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.numpy().data)
        except OSError as error:
            raise self._failed("written to", error) from error
        self._filed[key] = tensor.shape, tensor.dtype

    def take(self, key: str) -> torch.Tensor:
        """Give a tensor back, on the CPU if it was on disk, and forget it."""
        if key in self._in_memory:
            tensor = self._in_memory.pop(key)
            self._left += tensor.nbytes
            return tensor
        tensor = self.get(key)
        del self._filed[key]
        try:
            self._path(key).unlink()
        except OSError as error:
            raise self._failed("removed from", error) from error
        return tensor

    def get(self, key: str) -> torch.Tensor:
        """The same without forgetting it; the caller must not write to it."""
        if key in self._in_memory:
            return self._in_memory[key]
        shape, dtype = self._filed[key]
        data = bytearray(shape.numel() * dtype.itemsize)
        try:
            with self._path(key).open("rb") as file:
                read = file.readinto(data)
        except OSError as error:
            raise self._failed("read from", error) from error
        if read != len(data):
            raise self._failed("read from", OSError(f"{key} has {read} bytes of {len(data)}"))
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def __contains__(self, key: str) -> bool:
        return key in self._in_memory or key in self._filed

    def drop(self, prefix: str) -> None:
        """Forget all tensors whose keys begin so."""
        for key in [key for key in (*self._in_memory, *self._filed) if key.startswith(prefix)]:
            self.take(key)

    def _path(self, key: str) -> Path:
        assert self._folder is not None, "without a folder everything is in memory"
        return self._folder / key

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _failed(self, done: str, error: OSError) -> QuantkitError:
        return QuantkitError(f"hidden states can't be {done} {self._folder}",
                             why=f"{error.strerror or error}; finished layers are kept",
                             next="free some space and run the same command again, or calibrate with fewer "
                                  "windows or with importance: equal")

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._in_memory.clear()
        self._remove()
