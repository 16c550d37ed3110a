"""Model families: how a ``config.json`` finds its family, and which tensors such a model has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quantkit.models.config import ModelConfig
from quantkit.sources.base import TensorInfo
from quantkit.sources.causal_lm import WRAPPERS
from quantkit.support.errors import PluginError, UnsupportedModelError

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
EXPERT = ".experts."
"""What is outside of the decoder layers; where embeddings are tied, the first is both."""


@dataclass(frozen=True)
class LinearSlot:
    """A Linear layer that can be quantized, or the embedding, whose *out* is the vocabulary.

    Attributes:
        name: full name without ``.weight``: ``model.layers.0.self_attn.q_proj``.
        layer: index of its decoder layer; ``None`` for ``lm_head`` and the embedding.
        shares: layers of equal value see the same input (q/k/v; gate/up of an MLP or of one expert) and
            share statistics.
    """

    name: str
    out_features: int
    in_features: int
    layer: int | None
    shares: str


@dataclass(frozen=True)
class Architecture:
    """A registered model family.

    Attributes:
        model_type: the key of ``config.json``; also the registered name.
        classes: names in ``architectures`` that mean this causal language model, its own first.
        parse: ``config.json`` → ModelConfig; raises UnsupportedModelError.
    """

    model_type: str
    classes: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], ModelConfig]


def parse_config(hf_config: Mapping[str, Any],
                 infos: Mapping[str, TensorInfo] = MappingProxyType({})) -> ModelConfig:
    """Find the family by ``model_type`` and let it read the config.

    Args:
        hf_config: the parsed ``config.json``.
        infos: every stored tensor, if they are known: of an unknown family's model another name is only
            suggested if all of it fits.

    Raises:
        UnsupportedModelError: unknown family, another head than a language model's, or a key that
            changes the maths and is not implemented.
    """
    from quantkit.plugins.manager import describe_entry, registry
    from quantkit.plugins.registry import a_type

    table = registry("architectures")
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in table:
        missing, better = model_type is None, suggested(hf_config, infos)
        raise UnsupportedModelError(
            "config.json has no 'model_type'" if missing else f"no architecture is called {model_type!r}",
            why=better + f"known: {', '.join(sorted({*table, *WRAPPERS}))}",
            next="correct model_type in its config.json" if better or missing else
            "vllm serve MODEL runs it; quantkit quantize MODEL --recipe int4 --out OUT makes it smaller for "
            "vllm, and quantkit eval MODEL OUT says what that cost, both through transformers; int8, "
            "int4-rtn, fp8 and fp8-block need no calibration")
    architecture: Architecture = table.get(model_type)
    classes = hf_config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and set(map(str, classes)) & set(
            architecture.classes)):
        raise UnsupportedModelError(f"config.json: 'architectures' is {str(classes)[:200]}",
                                    why=f"{model_type} is implemented as {', '.join(architecture.classes)}",
                                    next="use the causal language model of this family")
    config = architecture.parse(hf_config)
    if not isinstance(config, ModelConfig):
        raise PluginError(f"{describe_entry('architectures', model_type)}: parse returned {a_type(config)}",
                          why="it must be a quantkit.models.config.ModelConfig",
                          next="correct it: quantkit.testing.check_architecture finds such errors")
    return config


def suggested(hf_config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> str:
    """A question that names the family whose class, keys and tensors these are; empty if there is none. Less
    isn't enough: a family whose rope pairs other dimensions has the keys and tensors of Llama, and would run
    and be wrong under that name."""
    from quantkit.plugins.manager import registry

    classes, shapes = hf_config.get("architectures"), {name: tuple(i.shape) for name, i in infos.items()}
    for name, architecture in registry("architectures").usable():
        if not isinstance(classes, list) or architecture.classes[0] not in map(str, classes):
            continue
        with contextlib.suppress(UnsupportedModelError):
            if tensor_shapes(architecture.parse({**hf_config, "model_type": name})) == shapes:
                return f"did you mean {name!r}? "
    return ""


def linear_slots(config: ModelConfig) -> tuple[LinearSlot, ...]:
    """Every Linear in the model's order, ``lm_head`` last and only if it has a weight of its own."""
    slots = [slot for index in range(config.num_layers)
             for slot in (*_attention_slots(config, index), *_mlp_slots(config, index))]
    if not config.tie_word_embeddings:
        slots.append(LinearSlot(HEAD, config.vocab_size, config.hidden_size, None, HEAD))
    return tuple(slots)


def all_slots(config: ModelConfig) -> tuple[LinearSlot, ...]:
    """Everything that can be quantized, in the model's order: the embedding (where it is the head too, it
    shares that one's statistics) and every Linear."""
    shares = HEAD if config.tie_word_embeddings else EMBEDDING
    return (LinearSlot(EMBEDDING, config.vocab_size, config.hidden_size, None, shares), *linear_slots(config))


def layer_of(name: str, count: int) -> int | None:
    """Which of ``count`` decoder layers a tensor is of; ``None``: of none, or of one beyond these."""
    parts = name.split(".", 3)
    index = int(parts[2]) if name.startswith("model.layers.") and parts[2].isdecimal() else count
    return index if index < count else None


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that an unquantized model has, by its Hugging Face name, in order."""
    hidden, experts = config.hidden_size, config.experts
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (config.vocab_size, hidden)}
    norms = ["post_attention", *(("pre_feedforward", "post_feedforward") if config.sandwich_norms else ())]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for slot in (*_attention_slots(config, i), *_mlp_slots(config, i)):
            shapes |= _slot_shapes(slot, _has_bias(config, slot))
        if experts is not None and experts.layers[i]:
            for name, rows in zip(experts.routers(i), (experts.count, 1)):
                shapes[f"{name}.weight"] = (rows, hidden)
            if experts.router_bias:
                shapes[f"{experts.routers(i)[0]}.bias"] = (experts.count,)
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in norms}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[f"{HEAD}.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention_slots(config: ModelConfig, index: int) -> Iterator[LinearSlot]:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inputs = (("qkv", q + 2 * kv),) if config.fused_projections else (("q", q), ("k", kv), ("v", kv))
    for name, rows in inputs:
        yield LinearSlot(f"{prefix}.self_attn.{name}_proj", rows, hidden, index, f"{prefix}.qkv")
    yield LinearSlot(f"{prefix}.self_attn.o_proj", hidden, q, index, f"{prefix}.o")


def _mlp_slots(config: ModelConfig, index: int) -> Iterator[LinearSlot]:
    """The slots of a layer's MLP, or of each of its experts, whose inputs differ."""
    prefix = f"model.layers.{index}"
    hidden = config.hidden_size
    experts = config.experts
    if experts is not None and experts.layers[index]:
        gate, up, down = experts.projections
        for number in (*range(experts.count), *((None,) if experts.shared_size else ())):
            name = experts.expert_name(index, number)
            size = experts.shared_size if number is None else experts.intermediate_size
            for part in (gate, up):
                yield LinearSlot(f"{name}.{part}", size, hidden, index, f"{name}.gate_up")
            yield LinearSlot(f"{name}.{down}", hidden, size, index, f"{name}.down")
        return
    size = config.intermediate_size
    inputs = (("gate_up", 2 * size),) if config.fused_projections else (("gate", size), ("up", size))
    for part, rows in inputs:
        yield LinearSlot(f"{prefix}.mlp.{part}_proj", rows, hidden, index, f"{prefix}.gate_up")
    yield LinearSlot(f"{prefix}.mlp.down_proj", hidden, size, index, f"{prefix}.down")


def _slot_shapes(slot: LinearSlot, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{slot.name}.weight": (slot.out_features, slot.in_features)}
    return weight | ({f"{slot.name}.bias": (slot.out_features,)} if bias else {})


def _has_bias(config: ModelConfig, slot: LinearSlot) -> bool:
    if ".self_attn." not in slot.name:
        return config.mlp_bias
    return config.o_bias if slot.name.endswith(".o_proj") else config.qkv_bias
