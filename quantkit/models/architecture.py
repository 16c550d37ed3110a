"""Model families: how a ``config.json`` finds its family, and which tensors such a model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UnsupportedModelError, did_you_mean
from quantkit.models.config import ModelConfig


@dataclass(frozen=True)
class LinearSlot:
    """A Linear layer that can be quantized.

    Attributes:
        name: full name without ``.weight``: ``model.layers.0.self_attn.q_proj``.
        layer: index of its decoder layer; ``None`` for ``lm_head``.
        shares: layers of equal value see the same input (q/k/v; gate/up) and share statistics.
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
        model_type: of ``config.json``; also the registered name.
        classes: names in ``architectures`` that mean this causal language model.
        parse: ``config.json`` → ModelConfig; raises UnsupportedModelError.
    """

    model_type: str
    classes: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], ModelConfig]


def parse_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Find the family by ``model_type`` and let it read the config.

    Raises:
        UnsupportedModelError: unknown family, another head than a language model's, or a key that
            changes the maths and is not implemented.
    """
    from quantkit.plugins import registry

    table = registry("architectures")
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in table:
        missing = model_type is None
        raise UnsupportedModelError(
            "config.json has no 'model_type'" if missing else f"no architecture is called {model_type!r}",
            why=did_you_mean("" if missing else str(model_type), table),
            next="use a model of one of these families, or install a plugin that adds it")
    architecture: Architecture = table.get(model_type)
    classes = hf_config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and set(map(str, classes)) & set(
            architecture.classes)):
        raise UnsupportedModelError(f"config.json: 'architectures' is {str(classes)[:200]}",
                                    why=f"{model_type} is implemented as {', '.join(architecture.classes)}",
                                    next="use the causal language model of this family")
    return architecture.parse(hf_config)


def linear_slots(config: ModelConfig) -> tuple[LinearSlot, ...]:
    """Every Linear in the model's order, ``lm_head`` last and only if it has a weight of its own."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = (("self_attn.q_proj", q, hidden, "qkv"), ("self_attn.k_proj", kv, hidden, "qkv"),
             ("self_attn.v_proj", kv, hidden, "qkv"), ("self_attn.o_proj", hidden, q, "o"),
             ("mlp.gate_proj", inter, hidden, "gate_up"), ("mlp.up_proj", inter, hidden, "gate_up"),
             ("mlp.down_proj", hidden, inter, "down"))
    slots = [LinearSlot(f"model.layers.{i}.{name}", rows, cols, i, f"model.layers.{i}.{shares}")
             for i in range(config.num_layers) for name, rows, cols, shares in table]
    if not config.tie_word_embeddings:
        slots.append(LinearSlot("lm_head", config.vocab_size, hidden, None, "lm_head"))
    return tuple(slots)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that an unquantized model has, by its Hugging Face name, in order."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    slots = linear_slots(config)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for slot in slots[7 * i: 7 * i + 7]:
            shapes |= _slot_shapes(slot, _has_bias(config, slot))
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    for slot in slots[7 * config.num_layers:]:
        shapes |= _slot_shapes(slot, False)
    return shapes


def _slot_shapes(slot: LinearSlot, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{slot.name}.weight": (slot.out_features, slot.in_features)}
    return weight | ({f"{slot.name}.bias": (slot.out_features,)} if bias else {})


def _has_bias(config: ModelConfig, slot: LinearSlot) -> bool:
    last = slot.name.rsplit(".", 1)[-1]
    return {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias,
            "o_proj": config.o_bias}.get(last, config.mlp_bias)
