"""A head's tensors in its published files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from quantkit.models.linear import Weights
from quantkit.models.loadable import PLAIN
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.stored_weight import StoredWeight
from quantkit.sources.base import ModelSource, QuantizedError, TensorInfo
from quantkit.support.errors import SourceError, UsageError

AGAIN = "get its files from the same place again"
INTEGERS = (torch.int64, torch.int32)


@contextmanager
def head_source(uri: str) -> Iterator[ModelSource]:
    """The files that hold a head. Raises UsageError: they are a quantized checkpoint, which holds none."""
    from quantkit.sources.open import open_source

    try:
        source = open_source(uri)
    except QuantizedError:
        raise UsageError(f"{uri} holds no head", why="a quantized checkpoint leaves it out",
                         next="name the files that the head was published in") from None
    try:
        yield source
    finally:
        source.close()


class HeadFiles:
    """The tensors.

    Args:
        source: that has them.
        name_of: what a layer asks for → how it is stored.
        dtype: that they are computed in.

    Attributes:
        weights: by the names that layers ask for; Linears are packed for the CPU's kernels.
        nbytes: of the Linears that were asked for.
    """

    def __init__(self, source: ModelSource, name_of: Callable[[str], str], dtype: torch.dtype) -> None:
        self._source, self._name_of, self._infos = source, name_of, source.tensors()
        self._asked: set[str] = set()
        self.nbytes = 0
        self.weights = Weights(self._tensor, self.has, dtype, pack=self._pack)

    def has(self, name: str) -> bool:
        """Whether there is a tensor."""
        return self._name_of(name) in self._infos

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers, int64. Raises SourceError: it is missing or another."""
        info = self._info(name)
        if info.dtype not in INTEGERS:
            raise SourceError(f"{self._source.uri}: tensor {info.name!r} is stored as {info.dtype}",
                              why="it must be whole numbers", next=AGAIN)
        return self._source.tensor(info.name).to(torch.int64)

    def refuse_unused(self, prefix: str, ignored: Collection[str]) -> None:
        """Raise SourceError if a tensor whose name begins so was never asked for."""
        for name in sorted(self._infos.keys() - self._asked - set(ignored)):
            if name.startswith(prefix):
                raise SourceError(f"{self._source.uri} has a tensor that nothing uses: {name[:120]!r}",
                                  why="such a head isn't implemented: its drafts would be others",
                                  next="take a head of another kind: see docs/drafts.md")

    def _tensor(self, name: str) -> torch.Tensor:
        info = self._info(name)
        dimensions = 1 if name.endswith(".bias") or "norm" in name.rpartition(".")[0] else 2
        if info.dtype not in PLAIN or len(info.shape) != dimensions or 0 in info.shape:
            raise SourceError(f"{self._source.uri}: tensor {info.name!r} is {info.dtype} {list(info.shape)}",
                              why=f"a head has floating-point numbers of {dimensions} dimensions there",
                              next=AGAIN)
        return self._source.tensor(info.name)

    def _info(self, name: str) -> TensorInfo:
        stored = self._name_of(name)
        self._asked.add(stored)
        if (info := self._infos.get(stored)) is None:
            raise SourceError(f"{self._source.uri} lacks the tensor {stored!r}",
                              why="the head can't compute without it", next=AGAIN)
        return info

    def _pack(self, weight: StoredWeight) -> LinearWeight:
        packed = weight.packed(self.weights.dtype)
        self.nbytes += packed.nbytes
        return packed
