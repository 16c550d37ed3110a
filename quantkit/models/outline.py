"""A model as quantizing sees it: which Linears it has, and in which decoder layers they are.

A family that is known here says so by its config. Of any other model the names and shapes of its tensors do.
The numbers in its tensors' names tell its layers, as in ``model.language_model.layers.3.mlp.up_proj.weight``.
What has most of the weights is the language model; a tower for images, a head that drafts and all else that
isn't in these layers stays as it is, and so do small matrices that decide much: routers, states, norms.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.formats.dtypes import FLOATS
from quantkit.models.architecture import LinearSlot, all_slots, parse_config, suggested
from quantkit.models.config import ModelConfig, RopeConfig
from quantkit.plugins.manager import registry
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import SourceError, UnsupportedModelError

LAYERS = "model.layers."
"""Where our families have their decoder layers."""
_NUMBERED = re.compile(r"((?:[^.]+\.)*?(?:layers|layer|blocks|block|h)\.)(0|[1-9][0-9]{0,4})\.")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,4})\.")
TOWER = (r"vis(?:ion|ual)|vit\.|image|audio|speech|video|projector|connector|perceiver|resampler|qformer|"
         r"aligner|vq|mtp|eagle|talker|codec")
"""A pattern in the path of what isn't the language model's layers."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg"})
_STATES = frozenset({"x_proj", "dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba"})
"""Small Linears that make a recurrent state's steps."""
_GROUPED = frozenset({"wo_a", "o_a_proj"})
"""Linears of DeepSeek V4 that engines multiply group by group, from the plain weight or from FP8 blocks."""
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
          "w1": "gate_up", "w3": "gate_up"}
"""Linears that see the same input, of which engines make one."""
NARROW = 16
"""Times the narrower side of a matrix: below the hidden size, too little would be saved."""
TOO_NARROW = "too narrow to save anything"
SHOWN = 5
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
UNSTATED = 1 << 20
"""Tokens that a model is taken to be made for whose config doesn't say it."""
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Outline:
    """What of a model can be quantized.

    Attributes:
        model_type: of its ``config.json``.
        slots: everything that can be, in the model's order.
        num_layers: of the language model.
        tied: whether its embedding is its head, too.
        layer_prefix: the beginning of its layers' names.
        hidden_size: of the language model.
        vocab_size: tokens that it has an embedding of.
        context: tokens that it was made for.
        kept: of a family that isn't known, parameters of the matrices that stay as they are, by why.
        config: the model's, where its family is known.
    """

    model_type: str
    slots: tuple[LinearSlot, ...]
    num_layers: int
    tied: bool
    layer_prefix: str = LAYERS
    hidden_size: int = 0
    vocab_size: int = 0
    context: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)
    config: ModelConfig | None = None

    @property
    def known_config(self) -> ModelConfig:
        """The model's config. Raises UnsupportedModelError if its family isn't known."""
        if self.config is None:
            raise UnsupportedModelError(
                f"no architecture is called {self.model_type!r}",
                why="this needs the model's mathematics, which isn't known here",
                next="quantize it by a data-free recipe such as int8, int4-rtn or fp8, for another engine")
        return self.config

    @property
    def offset_norms(self) -> bool:
        """Whether norms multiply by one more than their weights, where that is known."""
        return self.config is not None and self.config.offset_norms

    def layer_of(self, name: str) -> int | None:
        """Which decoder layer a tensor is of; ``None``: of none, or of one beyond these."""
        match = _NUMBER.match(name, len(self.layer_prefix)) if name.startswith(self.layer_prefix) else None
        return int(match[1]) if match is not None and int(match[1]) < self.num_layers else None

    def rule_name(self, name: str) -> str:
        """What rules of recipes call a layer: its name with the layers where our families have them."""
        return LAYERS + name.removeprefix(self.layer_prefix) if name.startswith(self.layer_prefix) else name


def sizes_of(outline: Outline) -> ModelConfig:
    """Of a model whose family isn't known, what texts and tables are cut by; of attention it says nothing."""
    return ModelConfig(
        model_type=outline.model_type, vocab_size=outline.vocab_size, hidden_size=outline.hidden_size,
        intermediate_size=0, num_layers=outline.num_layers, num_heads=0, num_kv_heads=0, head_dim=0,
        rms_norm_eps=0.0, rope=RopeConfig(), max_position_embeddings=outline.context,
        tie_word_embeddings=outline.tied, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
        sliding_windows=(None,) * outline.num_layers)


def is_known(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> bool:
    """Whether a model is of a family whose mathematics is known here. Also one that is in all but its name:
    that is a mistake in ``config.json``, which whoever parses it is told."""
    model_type = config.get("model_type")
    return (isinstance(model_type, str) and model_type in registry("architectures")) or bool(
        suggested(config, infos))


def outline_of(uri: str, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Outline:
    """That of any model. Raises what :func:`outline_of_tensors` and
    :func:`~quantkit.models.architecture.parse_config` do."""
    if is_known(config, infos):
        return outline_of_config(parse_config(config, infos))
    return outline_of_tensors(uri, config, infos)


def outline_of_config(config: ModelConfig) -> Outline:
    """That of a model of a known family."""
    return Outline(config.model_type, all_slots(config), config.num_layers, config.tie_word_embeddings,
                   hidden_size=config.hidden_size, vocab_size=config.vocab_size,
                   context=config.max_position_embeddings, config=config)


def outline_of_tensors(uri: str, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Outline:
    """That of any other model.

    Raises:
        SourceError: its config names no family, no tensor's name says which layer it is of, or none of these
            can be quantized.
    """
    if not isinstance(model_type := config.get("model_type"), str):
        raise SourceError(f"{uri}: config.json has no 'model_type'", why="no engine would know how to run it",
                          next="get the model's complete config.json")
    prefix, count = _layers(uri, config, infos)
    hidden = _hidden_size(config, infos, prefix)
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", (text if isinstance(text, dict) else {}).get(
        "tie_word_embeddings"))
    outline = Outline(model_type[:80], (), count, tied is True, prefix, hidden,
                      _stated(config, ("vocab_size",)) or 0, _stated(config, _CONTEXT) or UNSTATED)
    candidates, narrow = list[LinearSlot](), set[str]()
    kept, examples = Counter[str](), list[str]()
    for name, info in infos.items():
        if len(info.shape) < 2:
            continue
        layer = outline.layer_of(name)
        why = _reason_to_keep(name, info, hidden, layer)
        if why is not None and why != TOO_NARROW:
            kept[why] += _size(info)
            examples.append(f"{name[:120]}: {why}")
            continue
        linear = name.removesuffix(".weight")
        parent, _, module = linear.rpartition(".")
        candidates.append(LinearSlot(linear, info.shape[0], info.shape[1], layer,
                                     f"{parent}.{_FUSED.get(module, module)}"))
        if why is not None:
            narrow.add(linear)
    wide = {slot.shares for slot in candidates if slot.name not in narrow}
    slots: list[LinearSlot] = []
    for slot in candidates:
        # of queries, keys and values engines make one Linear, of which all or nothing is quantized
        if slot.name not in narrow or slot.shares in wide:
            slots.append(slot)
        else:
            kept[TOO_NARROW] += slot.out_features * slot.in_features
            examples.append(f"{slot.name[:120]}: {TOO_NARROW}")
    for slot in slots:
        bias = infos.get(f"{slot.name}.bias")
        if bias is not None and bias.shape != (slot.out_features,):
            raise SourceError(f"{uri}: {slot.name}.weight lies as [in, out]",
                              why=f"its bias is {list(bias.shape)}, and a Linear's weight has a row for each "
                                  "number of it: what is quantized so, no engine reads",
                              next="give a model of another family, such as llama, qwen3 or smollm3")
    if not slots:
        raise SourceError(f"{uri}: nothing in it can be quantized",
                          why="\n".join(examples[:SHOWN]) or "it has no matrix",
                          next="give the folder of a language model in transformers' layout")
    slots.sort(key=lambda slot: slot.layer or 0)
    return replace(outline, slots=tuple(slots), kept=dict(kept.most_common()))


def _layers(uri: str, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> tuple[str, int]:
    """The beginning of the language model's layers, and their number."""
    sizes: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    for name, info in infos.items():
        if (match := _NUMBERED.match(name)) is not None:
            sizes[match[1]] += _size(info)
            numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]) + 1)
    language = {prefix: size for prefix, size in sizes.items() if not re.search(TOWER, prefix)} or sizes
    if not language:
        raise SourceError(f"{uri}: no tensor's name says which layer it is of",
                          why="names such as model.layers.0.mlp.up_proj.weight do",
                          next="give the folder of a language model in transformers' layout")
    prefix = max(language, key=lambda name: language[name])
    stated = _stated(config, _COUNTS)
    # further layers, as DeepSeek's files have them, draft tokens
    return prefix, numbers[prefix] if stated is None else min(numbers[prefix], stated)


def _reason_to_keep(name: str, info: TensorInfo, hidden: int, layer: int | None) -> str | None:
    """Why a tensor of two or more dimensions isn't quantized; ``None`` if it can be."""
    module, _, last = name.rpartition(".")
    module = module.rpartition(".")[2]
    if layer is None:
        return "outside of the language model's layers"
    if len(info.shape) > 2:
        return ("experts in one tensor" if "expert" in name or "moe" in name else
                "a convolution" if "conv" in name else f"{len(info.shape)} dimensions")
    if last != "weight":
        return "no Linear's weight"
    if info.dtype not in FLOATS.values():
        return f"stored as {str(info.dtype).removeprefix('torch.')}"
    if module in _ROUTERS or ".router." in name:
        return "a router"
    if module in _STATES:
        return "steps of a recurrent state"
    if ".compressor." in name:
        return "a compressor of keys and values"
    if module in _GROUPED:
        return "multiplied group by group"
    if "norm" in module or "embed" in module or "bias" in module:
        return "a norm, a position or an embedding"
    return TOO_NARROW if min(info.shape) * NARROW <= hidden else None


def _hidden_size(config: Mapping[str, Any], infos: Mapping[str, TensorInfo], prefix: str) -> int:
    """By the config, or else the commonest side of the layers' matrices."""
    if (stated := _stated(config, ("hidden_size", "n_embd", "d_model"))) is not None:
        return stated
    sides = Counter(side for name, info in infos.items() if name.startswith(prefix) and len(info.shape) == 2
                    for side in info.shape)
    return sides.most_common(1)[0][0] if sides else 0


def _stated(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """The first of these keys that has a positive whole number, in the language model's table or outside."""
    text = config.get("text_config")
    for table in (text if isinstance(text, dict) else {}, config):
        for key in keys:
            if type(table.get(key)) is int and table[key] > 0:
                return int(table[key])
    return None


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape)
