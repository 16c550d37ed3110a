"""Models seen as causal language models, by whose names and config everything else goes.

The language model inside a model of images and text, and one that was saved without its head, as embedding
models are, have other names of tensors. The config of the one inside is ``text_config``; its tensors lose
their prefix, and the rest isn't there. What such a model does with text alone is what its text model does:
positions of three axes, as Qwen3-VL's, are the same number three times then.

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

from quantkit.plugins.manager import registry
from quantkit.sources.base import ModelSource, OuterModel, TensorInfo, release
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SourceError

WRAPPERS = {"gemma3": "gemma3_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text",
            "mistral3": "mistral", "internvl": "qwen2", "smolvlm": "llama", "idefics3": "llama",
            "llava": "llama", "llava_next": "llama", "llava_onevision": "qwen2"}
"""By the outer ``model_type``, that of the text model, unless ``text_config`` names another one."""
TEXT_TYPES = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Text models that are, but for positions of images, of a family with another name."""
_ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""What a config of these doesn't say, or isn't asked for: the chosen experts' weights always sum to 1."""
_AXES = ("mrope_section", "mrope_interleaved")
"""Keys of a rope that say which frequencies rotate by which axis of a position."""
SPELLINGS = ({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
             {"model.": "model.language_model.", "lm_head.": "lm_head."},
             {"model.": "model.text_model.", "lm_head.": "lm_head."})
"""What begins names in files of such models, by what begins them in the text model."""
OUTER = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id", "pad_token_id")
"""Keys beside ``text_config`` that are meant for it too, unless it has its own."""
_OUTER_COUNTS = ("tie_word_embeddings",)
"""Those that count, whatever it says: the head is the outer model's."""
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
    if str(config.get("model_type")) in WRAPPERS and _inner_type(config) in registry("architectures"):
        return _multimodal(source, config)
    if str(config.get("model_type")) in registry("architectures") and names >= set(_BARE) and not any(
            name.startswith("model.") or name == "fc.weight" for name in names):
        return _headless(source, config)  # with fc.weight it is a head that drafts
    return source


def text_config(uri: str, outer: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model in a model of images and text. Raises SourceError: that isn't there."""
    inner, model_type = outer.get("text_config"), str(outer.get("model_type"))[:80]
    if not isinstance(inner, dict) or model_type not in WRAPPERS:
        raise SourceError(f"{uri}: its config.json, of a {model_type} model, has no text_config",
                          why="the language model inside is described there",
                          next="get the model's complete config.json")
    kind = _inner_type(outer)
    config = {**{key: outer[key] for key in OUTER if key in outer}, **inner, "model_type": kind,
              **{key: outer[key] for key in _OUTER_COUNTS if key in outer},
              **_ALWAYS.get(str(inner.get("model_type") or WRAPPERS[model_type]), {}),
              "architectures": [*registry("architectures").get(kind).classes[:1]]}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict):
            config[key] = {name: value for name, value in rope.items() if name not in _AXES}
    return config


def _inner_type(outer: Mapping[str, Any]) -> str:
    """The ``model_type`` by which the text model's mathematics may be known here."""
    inner = outer.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, dict) else None
    kind = str(kind or WRAPPERS.get(str(outer.get("model_type"))))
    return TEXT_TYPES.get(kind, kind)


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
