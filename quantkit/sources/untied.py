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
    return ResolvedHeadSource(source, infos[EMBEDDING].shape == infos[HEAD].shape and _equal(source))


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


class ResolvedHeadSource(SourceWrapper):
    """The same model with a head that is its embedding, or one of its own: of the embedding's values where
    the source has none.

    Args:
        source: the source of the model.
        tied: whether the head is the embedding: it isn't there a second time then.
    """

    def __init__(self, source: ModelSource, tied: bool) -> None:
        super().__init__(source)
        self._tied = tied

    def config(self) -> dict[str, Any]:
        return {**self._source.config(), "tie_word_embeddings": self._tied}

    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = dict(self._source.tensors())
        if self._tied:
            infos.pop(HEAD, None)
        elif HEAD not in infos and EMBEDDING in infos:  # a model without an embedding is refused by the plan
            infos[HEAD] = dataclasses.replace(infos[EMBEDDING], name=HEAD)
        return infos

    def _inner(self, name: str) -> str:
        return EMBEDDING if name == HEAD and HEAD not in self._source.tensors() else name
