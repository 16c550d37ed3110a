"""A language model whose tensors have other names than a causal language model's: the one inside Gemma 3's
multimodal models, and one that was saved without its head, as embedding models are.

The config of the one inside is ``text_config``; its tensors lose their prefix, and the rest isn't there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.sources.base import ModelSource, TensorInfo
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SourceError

CLASSES = {"gemma3": "Gemma3ForCausalLM"}
"""By the outer ``model_type``, the text model's name in ``architectures``."""
PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."), ("lm_head.", "lm_head."))
"""As files have them, and what they are for the text model."""
OUTER = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys beside ``text_config`` that are meant for it too, unless it has its own."""
_BARE = ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight")
"""Tensors of every model by the names that they have without a head beside it."""


def text_part(source: ModelSource) -> ModelSource:
    """The source, or the language model in it by the names of a causal language model.

    Raises:
        SourceError: its config says that there is one and doesn't describe it; or it has neither a head nor
            an embedding that is one.
    """
    config, names = source.config(), source.tensors().keys()
    if str(config.get("model_type")) in CLASSES:
        return _multimodal(source, config)
    if names >= set(_BARE) and not any(name.startswith("model.") or name == "fc.weight" for name in names):
        return _headless(source, config)  # with fc.weight it is a head that drafts
    return source


def _multimodal(source: ModelSource, outer: dict[str, Any]) -> ModelSource:
    inner = outer.get("text_config")
    if not isinstance(inner, dict):
        raise SourceError(f"{source.uri}: its config.json, of a {outer['model_type']} model, has no "
                          "text_config",
                          why="the language model inside is described there",
                          next="get the model's complete config.json")
    config = {**{key: outer[key] for key in OUTER if key in outer}, **inner,
              "architectures": [CLASSES[outer["model_type"]]]}
    names = {new: name for name in source.tensors() if (new := _inner(name)) is not None}
    return RenamedSource(source, config, names)


def _headless(source: ModelSource, config: dict[str, Any]) -> ModelSource:
    infos = source.tensors()
    if config.get("tie_word_embeddings") is not True and "lm_head.weight" not in infos:
        raise SourceError(f"{source.uri} has no lm_head, and by its config.json the embedding is none either",
                          why="it was saved for embeddings, for which a head isn't needed",
                          next='for /v1/embeddings write "tie_word_embeddings": true into its config.json; '
                               "text that it generates then means nothing")
    classes = config.get("architectures")
    if isinstance(classes, list):  # Qwen3Model is what Qwen3ForCausalLM has a head on
        config["architectures"] = [f"{name.removesuffix('Model')}ForCausalLM" if str(name).endswith("Model")
                                   else name for name in classes]
    names = {name if name.startswith("lm_head.") else f"model.{name}": name for name in infos}
    return RenamedSource(source, config, names)


class RenamedSource(SourceWrapper):
    """What isn't named here is the source's.

    Args:
        source: the source whose tensors get other names.
        config: the config of the model that these make.
        names: the source's names of tensors by their new ones; others aren't there.
    """

    def __init__(self, source: ModelSource, config: dict[str, Any], names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._config, self._names = config, names

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
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
