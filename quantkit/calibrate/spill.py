"""Hidden states between two passes: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType

import torch

from quantkit.plan import STATES_IN_MEMORY


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
        """Keep a tensor; the caller must not write to it afterwards. Raises OSError if the disk is full."""
        if tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            self._held[key] = tensor
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        (self._folder / key).write_bytes(whole.numpy().data)
        self._filed[key] = tensor.shape, tensor.dtype

    def take(self, key: str) -> torch.Tensor:
        """Give a tensor back, on the CPU if it was on disk, and forget it."""
        if key in self._held:
            tensor = self._held.pop(key)
            self._left += tensor.nbytes
            return tensor
        shape, dtype = self._filed.pop(key)
        path = self._folder / key
        found = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).view(shape)
        path.unlink()
        return found

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._held.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
