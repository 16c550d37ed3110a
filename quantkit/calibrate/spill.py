"""Hidden states between two passes: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType

import torch

from quantkit.errors import QuantkitError
from quantkit.peak import STATES_IN_MEMORY


class Spill:
    """Tensors that are put once and taken once. Use it in a ``with``.

    Args:
        folder: made when the first tensor doesn't fit; removed at the end. What an earlier run left
            there is removed at the beginning.
        limit: bytes kept in memory.
    """

    def __init__(self, folder: Path, limit: int = STATES_IN_MEMORY) -> None:
        self._folder, self._left = folder, limit
        self._held: dict[str, torch.Tensor] = {}
        self._filed: dict[str, tuple[torch.Size, torch.dtype]] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a tensor; the caller must not write to it afterwards. Raises QuantkitError for a full disk."""
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._held[key] = tensor
            return
        whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / key).write_bytes(whole.numpy().data)
        except OSError as error:
            raise self._failed("written to", error) from error
        self._filed[key] = tensor.shape, tensor.dtype

    def take(self, key: str) -> torch.Tensor:
        """Give a tensor back, on the CPU if it was on disk, and forget it."""
        if key in self._held:
            tensor = self._held.pop(key)
            self._left += tensor.nbytes
            return tensor
        shape, dtype = self._filed.pop(key)
        path = self._folder / key
        try:
            data = bytearray(path.read_bytes())
            path.unlink()
        except OSError as error:
            raise self._failed("read from", error) from error
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def _failed(self, done: str, error: OSError) -> QuantkitError:
        return QuantkitError(f"hidden states can't be {done} {self._folder}",
                             why=f"{error.strerror or error}; finished layers are kept",
                             next="free some space and run the same command again, or calibrate with fewer "
                                  "samples or with importance: equal")

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._held.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
