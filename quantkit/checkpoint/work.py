"""Stores units that only the run needs, to resume from; they never get into the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from quantkit.checkpoint.shards import LazyTensor
from quantkit.checkpoint.writer import WORK, CheckpointWriter
from quantkit.sources.base import TensorInfo


class WorkStore:
    """Units of one piece of work inside a run. Each is written atomically, hashed and durable, as layers are.

    Args:
        writer: of the run.
        name: of the work: letters, digits and dashes.
    """

    def __init__(self, writer: CheckpointWriter, name: str) -> None:
        self._writer, self._prefix = writer, f"{WORK}{name}."

    def has(self, key: str) -> bool:
        """Whether a unit is on disk and its bytes are those that were written."""
        return self._writer.has(self._prefix + key)

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store tensors by name; durable when it returns. Raises CheckpointError if the disk fails."""
        self._writer.put(self._prefix + key, tensors, [])

    def get(self, key: str) -> dict[str, torch.Tensor]:
        """Copies of what was put, which the files may be removed under. Raises CheckpointError if it isn't
        there."""
        return {name: tensor.clone() for name, tensor in self._writer.get(self._prefix + key)[0].items()}

    def tensor(self, key: str, name: str) -> torch.Tensor:
        """One tensor of what was put, and no others are read. Raises CheckpointError if it isn't there."""
        return self._writer.tensor(self._prefix + key, name)

    def put_batches(self, key: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
                    batches: Iterable[torch.Tensor]) -> None:
        """Store tensors of these shapes and one dtype, each made when it is written, so that it is alone in
        memory; durable when it returns. Raises CheckpointError if the disk fails, and what
        ``batches`` raises."""
        iterator = iter(batches)
        self._writer.put(self._prefix + key, {
            _batch(i): LazyTensor(TensorInfo(_batch(i), shape, dtype), lambda: next(iterator))
            for i, shape in enumerate(shapes)}, [])

    def batch(self, key: str, index: int) -> torch.Tensor:
        """One of those that :meth:`put_batches` stored. Raises CheckpointError if it isn't there."""
        return self._writer.tensor(self._prefix + key, _batch(index))

    def drop(self, key: str) -> None:
        """Remove a unit that nothing will ask for again. Raises CheckpointError if it can't be."""
        self._writer.drop(self._prefix + key)

    def clear(self) -> None:
        """Remove all units. Raises CheckpointError if one can't be."""
        self._writer.drop_all(self._prefix)


def _batch(index: int) -> str:
    """Names that sort as numbers do: tensors of one dtype are written in the order of their names."""
    return f"{index:08d}"
