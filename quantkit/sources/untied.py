"""Presents a model with tied embeddings as one with a separate head: the same tensor under two names.

So a recipe can quantize what every token multiplies and leave what every token looks up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.sources.base import TensorInfo
from quantkit.sources.wrapper import SourceWrapper

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
