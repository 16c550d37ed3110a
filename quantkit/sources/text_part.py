"""The language model inside a multimodal model, presented as a text model: Gemma 3's.

Its config is the inner ``text_config``, its tensors lose their prefix, and the rest isn't there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import SourceError
from quantkit.sources.base import ModelSource, TensorInfo
from quantkit.sources.wrapper import SourceWrapper

CLASSES = {"gemma3": "Gemma3ForCausalLM"}
"""By the outer ``model_type``, the text model's name in ``architectures``."""
PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."), ("lm_head.", "lm_head."))
"""As files have them, and what they are for the text model."""
OUTER = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys beside ``text_config`` that are meant for it too, unless it has its own."""


def text_part(source: ModelSource) -> ModelSource:
    """The source, or the text model inside of it. Raises SourceError if there is none."""
    return TextOnlySource(source) if str(source.config().get("model_type")) in CLASSES else source


class TextOnlySource(SourceWrapper):
    """What isn't named here is the source's.

    Args:
        source: of a model whose ``model_type`` is in :data:`CLASSES`.

    Raises:
        SourceError: its config has no ``text_config``.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        outer = source.config()
        inner = outer.get("text_config")
        if not isinstance(inner, dict):
            raise SourceError(f"{source.uri}: its config.json, of a {outer['model_type']} model, has no "
                              "text_config",
                              why="the language model inside is described there",
                              next="get the model's complete config.json")
        self._config = {**{key: outer[key] for key in OUTER if key in outer}, **inner,
                        "architectures": [CLASSES[outer["model_type"]]]}
        self._names = {new: name for name in source.tensors() if (new := _inner(name)) is not None}

    def config(self) -> dict[str, Any]:
        """The text model's own."""
        return dict(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The text model's, by the names that they have in a text model."""
        infos = self._source.tensors()
        return {new: TensorInfo(new, infos[name].shape, infos[name].dtype)
                for new, name in self._names.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One of them. Raises SourceError for an unknown name."""
        if name not in self._names:
            raise SourceError(f"{self.uri} has no tensor {name!r}")
        return self._source.tensor(self._names[name])

    @property
    def file_bytes(self) -> int:
        """Bytes of the text model's tensors: what else the files hold is never read."""
        return sum(info.nbytes for info in self.tensors().values())

    def _inner(self, name: str) -> str:
        return self._names[name]


def _inner(name: str) -> str | None:
    return next((new + name.removeprefix(old) for old, new in PREFIXES if name.startswith(old)), None)
