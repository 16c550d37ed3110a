"""Whether a model's head is its embedding: as the tensors say, or as a recipe wants it.

A recipe can quantize what every token multiplies and leave what every token looks up; the same tensor has two
names then. And a file can say that both are one and store two that differ, as adapters that trained the head
do once they are merged: then the tensors count, as in transformers 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.sources.base import ModelSource, TensorInfo, release
from quantkit.sources.wrapper import SourceWrapper

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK = 1 << 24
"""Values compared at once: they fit in little memory whatever the tensors' size."""


def resolve_head(source: ModelSource) -> ModelSource:
    """The source. One that stores a head, and whose config doesn't say that this isn't the embedding, gets a
    config that does, or has no head any more where its values are the embedding's.

    Raises:
        SourceError: a tensor can't be read.
    """
    infos, tied = source.tensors(), source.config().get("tie_word_embeddings")
    if tied is False or not {EMBEDDING, HEAD} <= infos.keys():
        return source
    return StoredHeadSource(source, infos[EMBEDDING].shape == infos[HEAD].shape and _equal(source))


def _equal(source: ModelSource) -> bool:
    """Whether embedding and head, of one shape, have the same values; of one dtype: the same bytes. Little of
    what is read of their file is in memory at any time."""
    first, second = source.tensor(EMBEDDING), source.tensor(HEAD)
    if first.dtype == second.dtype:
        first, second = first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    for a, b in zip(first.flatten().split(_CHUNK), second.flatten().split(_CHUNK)):
        same = torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.double(), b.double())
        release(source)
        if not same:
            return False
    return True


class StoredHeadSource(SourceWrapper):
    """Everything but the config and the head is the source's.

    Args:
        source: that has both tensors.
        tied: whether the head is the embedding: it isn't there a second time then.
    """

    def __init__(self, source: ModelSource, tied: bool) -> None:
        super().__init__(source)
        self._tied = tied

    def config(self) -> dict[str, Any]:
        """The source's, with ``tie_word_embeddings`` as the tensors are."""
        return {**self._source.config(), "tie_word_embeddings": self._tied}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's, without a head that is the embedding."""
        return {name: info for name, info in self._source.tensors().items() if name != HEAD or not self._tied}

    def tensor(self, name: str) -> torch.Tensor:
        """The source's."""
        return self._source.tensor(name)


class UntiedSource(SourceWrapper):
    """Everything but the config and the head's name is the source's.

    Args:
        source: of a model with tied embeddings.
    """

    def config(self) -> dict[str, Any]:
        """The source's, with ``tie_word_embeddings`` false."""
        return {**self._source.config(), "tie_word_embeddings": False}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's, and the head."""
        infos = self._source.tensors()
        if EMBEDDING not in infos:  # the plan says so
            return infos
        return {**infos, HEAD: dataclasses.replace(infos[EMBEDDING], name=HEAD)}

    def tensor(self, name: str) -> torch.Tensor:
        """The source's; the head is the embedding."""
        return self._source.tensor(self._inner(name))

    def _inner(self, name: str) -> str:
        return EMBEDDING if name == HEAD else name
