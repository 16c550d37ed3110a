"""Models seen as causal language models, by whose names and config everything else goes.

The language model inside Gemma 3's multimodal models, and one that was saved without its head, as embedding
models are, have other names of tensors. The config of the one inside is ``text_config``; its tensors lose
their prefix, and the rest isn't there.

Whether a model's head is its embedding is as the tensors say, or as a recipe wants it. A recipe can quantize
what every token multiplies and leave what every token looks up; the same tensor has two names then. And a
file can say that both are one and store two that differ, as adapters that trained the head do once they are
merged: then the tensors count, as in transformers 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.sources.base import ModelSource, OuterModel, TensorInfo, release
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SourceError

CLASSES = {"gemma3": "Gemma3ForCausalLM"}
"""By the outer ``model_type``, the text model's name in ``architectures``."""
SPELLINGS = ({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
             {"model.": "model.language_model.", "lm_head.": "lm_head."})
"""What begins names in files of such models, by what begins them in the text model."""
OUTER = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys beside ``text_config`` that are meant for it too, unless it has its own."""
_BARE = ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight")
"""Tensors of every model by the names that they have without a head beside it."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK = 1 << 24
"""Values compared at once: they fit in little memory whatever the tensors' size."""


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


def text_config(uri: str, outer: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model in a model of images and text. Raises SourceError: that isn't there."""
    inner, model_type = outer.get("text_config"), str(outer.get("model_type"))[:80]
    if not isinstance(inner, dict) or model_type not in CLASSES:
        raise SourceError(f"{uri}: its config.json, of a {model_type} model, has no text_config",
                          why="the language model inside is described there",
                          next="get the model's complete config.json")
    return {**{key: outer[key] for key in OUTER if key in outer}, **inner,
            "architectures": [CLASSES[model_type]]}


def config_around(uri: str, outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model of images and text whose text model has ``text`` for its own: a recipe may give
    that a head of its own."""
    tied = text.get("tie_word_embeddings")
    if text_config(uri, outer).get("tie_word_embeddings") == tied:
        return dict(outer)
    stated = {"tie_word_embeddings": tied}
    return {**outer, **stated, "text_config": {**outer["text_config"], **stated}}


def _multimodal(source: ModelSource, outer: dict[str, Any]) -> ModelSource:
    config = text_config(source.uri, outer)
    infos = source.tensors()
    prefixes = max(SPELLINGS, key=lambda spelling: sum(name.startswith(spelling["model."]) for name in infos))
    names = {new + name.removeprefix(old): name for name in infos for new, old in prefixes.items()
             if name.startswith(old)}
    inside = set(names.values())
    rest = {name: info for name, info in infos.items() if name not in inside}
    return RenamedSource(source, config, names, OuterModel(outer, prefixes, rest, source.tensor))


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
        outer: the model that this is a part of.
    """

    def __init__(self, source: ModelSource, config: dict[str, Any], names: Mapping[str, str],
                 outer: OuterModel | None = None) -> None:
        super().__init__(source)
        self._config, self._names, self._outer = config, names, outer

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

    @property
    def outer(self) -> OuterModel | None:
        return self._outer

    def _inner(self, name: str) -> str:
        return self._names[name]


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
