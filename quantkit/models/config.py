"""What the layers need to know of a model, read strictly from its ``config.json``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.models.reader import HARMLESS, ConfigReader
from quantkit.models.rope_config import RopeConfig, parse_rope

__all__ = ["Experts", "ModelConfig", "RopeConfig", "parse_dense"]

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]

ROUTER_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys that matter only while experts are trained."""
MAX_EXPERTS = 4096
MAX_LAYERS = 4096
MAX_EXPERTS_IN_ALL = 100_000
"""Of a layer, layers, and experts of all layers. More is a malformed file, not a model."""


@dataclass(frozen=True)
class Experts:
    """MLPs of which a router chooses some for every token, https://arxiv.org/abs/1701.06538.

    Attributes:
        count: the number of experts of a layer; each is a Linear of its own.
        chosen: the number of experts that a token gets.
        intermediate_size: the size of each expert.
        normalized: the chosen ones' weights sum to 1.
        layers: one a layer, whether it has experts or an MLP.
        module: their name in the file, beside ``self_attn``.
        projections: gate, up and down of an expert, as they are called there.
        router, router_bias: what the router is called there, and whether it has a bias.
        shared_size: the size of one more expert, which every token gets, times the sigmoid of a gate; 0:
            there is none.
    """

    count: int
    chosen: int
    intermediate_size: int
    normalized: bool
    layers: tuple[bool, ...]
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    router_bias: bool = False
    shared_size: int = 0

    def expert_name(self, layer: int, number: int | None) -> str:
        """Full name of an expert; ``None``: of the shared one."""
        name = f"model.layers.{layer}.{self.module}"
        return f"{name}.shared_expert" if number is None else f"{name}.experts.{number}"

    def routers(self, layer: int) -> tuple[str, ...]:
        """Full names of what says how much of each expert a token gets; never quantized."""
        name = f"model.layers.{layer}.{self.module}"
        shared = (f"{name}.shared_expert_gate",) if self.shared_size else ()
        return f"{name}.{self.router}", *shared


@dataclass(frozen=True)
class BlockDiffusion:
    """A model that writes a block of tokens at once, https://arxiv.org/abs/2503.09573: a token sees all of
    its own block, and those before.

    Attributes:
        block_size: tokens of a block; the first block begins with a text's first token.
        mask_token: the id that stands for a token that isn't known yet.
        confidence: a step also commits tokens that are likelier; 1: none.
        even: a block's tokens are shared out evenly among the steps that are left, as dLLM does.
    """

    block_size: int
    mask_token: int
    confidence: float = 1.0
    even: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a gated MLP, or experts.

    What follows ``sliding_windows`` is what some families do otherwise than Llama.

    Attributes:
        sliding_windows: one a layer; with ``w`` a query at position p sees keys at ``(p - w, p]``,
            with ``None`` all keys up to p.
        qkv_bias, o_bias, mlp_bias: whether those linear layers have a bias; experts count as an MLP.
        qk_norm: queries and keys are normalized a head before they are rotated.
        fused_projections: q, k and v are one Linear, gate and up another.
        experts: in place of some or all layers' MLP.
        activation: the function of the MLP's gate; ``gelu_tanh`` is GELU's approximation by tanh,
            ``clamped_silu``
            :func:`~quantkit.ops.rows.clamped_silu_mul`, which changes the other factor too.
        activation_limit: the limit of ``clamped_silu``.
        local_rope: the rope of layers with a window; ``None``: the same as of all others.
        sandwich_norms: results of attention and MLP are normalized too before they are added.
        offset_norms: the norms' weights are stored less 1.
        embedding_scale: embeddings are multiplied by it.
        attention_scale: multiplies the scores, in place of ``head_dim ** -0.5``.
        attention_sinks: each query head has a learned number that joins its softmax as a score would, and
            weighs no value.
        diffusion: that it writes blocks.
        attention_softcap, logit_softcap: ``c``, where scores or logits ``x`` become ``c · tanh(x / c)``.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    fused_projections: bool = False
    experts: Experts | None = None
    activation: Activation = "silu"
    activation_limit: float = 0.0
    local_rope: RopeConfig | None = None
    sandwich_norms: bool = False
    offset_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    diffusion: BlockDiffusion | None = None

    def rope_of(self, window: int | None) -> RopeConfig:
        """The rope of layers with this window."""
        return self.rope if window is None else self.local_rope or self.rope


def parse_dense(config: ConfigReader, model_type: str, *, windows: tuple[int | None, ...], qkv_bias: bool,
                o_bias: bool, mlp_bias: bool = False, qk_norm: bool = False, kv_heads: int | None = None,
                max_positions: int = 2048, head_dim: int | None = None, tied: bool = False,
                eps: float = 1e-6, rope: RopeConfig | None = None, ignored: Collection[str] = (),
                **differences: Any) -> ModelConfig:
    """What all families share. The keyword arguments after ``qk_norm`` are the family's defaults.

    Args:
        rope: the rope, if the family has read it already.
        ignored: the family's own keys that say nothing about the maths.
        differences: from Llama: fields of :class:`ModelConfig` after ``sliding_windows``.

    Raises:
        UnsupportedModelError: a key is missing, malformed, unknown or not implemented.
    """
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv = config.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv:
        raise config.wrong("num_key_value_heads", kv, f"it must divide num_attention_heads {heads}")
    dim = head_size(config, head_dim)
    positions = config.integer("max_position_embeddings", max_positions)
    parsed = ModelConfig(
        model_type=model_type, vocab_size=config.integer("vocab_size"), hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"), num_layers=layer_count(config),
        num_heads=heads, num_kv_heads=kv, head_dim=dim, rms_norm_eps=config.number("rms_norm_eps", eps),
        rope=rope or parse_rope(config, positions), max_position_embeddings=positions,
        tie_word_embeddings=config.flag("tie_word_embeddings", tied), qkv_bias=qkv_bias, o_bias=o_bias,
        mlp_bias=mlp_bias, qk_norm=qk_norm, sliding_windows=windows, **differences)
    config.finish(HARMLESS | set(ignored))
    return parsed


def head_size(config: ConfigReader, default: int | None = None) -> int:
    """``head_dim``; where neither it nor a default is given, ``hidden_size / num_attention_heads``."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.raw("head_dim", default) is None and hidden % heads:
        raise config.wrong("hidden_size", hidden,
                           f"without head_dim it must be a multiple of num_attention_heads {heads}")
    dim = config.integer("head_dim", default or hidden // heads, minimum=2)
    if dim % 2:
        raise config.wrong("head_dim", dim, "rotary embedding needs an even number")
    return dim


def expert_counts(config: ConfigReader, count: int, chosen: int) -> tuple[int, int]:
    """Experts of a layer, ``num_local_experts`` or ``num_experts``, and how many of them a token gets.

    Args:
        count, chosen: the family's defaults.

    Raises:
        UnsupportedModelError: the two names disagree, or more are chosen than there are.
    """
    names = ("num_local_experts", "num_experts")
    counts = {name: config.integer(name, count, maximum=MAX_EXPERTS) for name in names
              if config.raw(name) is not None}
    if len(set(counts.values())) > 1:
        raise config.wrong(names[1], counts[names[1]], f"{names[0]} is {counts[names[0]]}")
    count = next(iter(counts.values()), count)
    if count * layer_count(config) > MAX_EXPERTS_IN_ALL:
        raise config.wrong(next(iter(counts), names[0]), count,
                           f"{MAX_EXPERTS_IN_ALL:,} experts in all layers are allowed")
    return count, config.integer("num_experts_per_tok", chosen, maximum=count)


def layer_count(config: ConfigReader) -> int:
    """``num_hidden_layers``, bounded."""
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)


def uniform_windows(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """The same window for every layer, after checking that ``layer_types``, if given, agrees."""
    layers = layer_count(config)
    expected = "full_attention" if window is None else "sliding_attention"
    types = config.raw("layer_types")
    if types is not None and types != [expected] * layers:
        raise config.wrong("layer_types", types, f"this family has {layers} layers of {expected}")
    return (window,) * layers


def mixed_windows(config: ConfigReader, *, default_window: int,
                  default_full_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: ``layer_types`` if given, else layers from ``max_window_layers`` on have the window
    when ``use_sliding_window`` is set and ``sliding_window`` isn't null.

    Raises:
        UnsupportedModelError: ``layer_types`` has an unknown kind, a wrong length, or asks for a
            window that isn't there.
    """
    layers = layer_count(config)
    enabled = config.flag("use_sliding_window", False) and not config.null("sliding_window")
    window_size = config.integer("sliding_window", default_window)
    full = config.integer("max_window_layers", default_full_layers, minimum=0)
    window = window_size if enabled else None
    return _listed(config, window, tuple(window if i >= full else None for i in range(layers)))


def periodic_windows(config: ConfigReader, window: int | None, period: int) -> tuple[int | None, ...]:
    """Gemma's rule: ``layer_types`` if given, else every ``period``-th layer has no window, all others do.
    Raises UnsupportedModelError as :func:`mixed_windows`."""
    return _listed(config, window, tuple(window if (i + 1) % period else None
                                         for i in range(layer_count(config))))


def _listed(config: ConfigReader, window: int | None,
            default: tuple[int | None, ...]) -> tuple[int | None, ...]:
    types: Collection[Any] | None = config.raw("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default):
        raise config.wrong("layer_types", types, f"it must list {len(default)} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.wrong("layer_types", types, f"{kind!r} is not implemented")
        if kind == "sliding_attention" and window is None:
            raise config.wrong("layer_types", types, "it asks for a window, but use_sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
