"""The model families: how each reads its ``config.json``, and where it differs from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import (
    ROUTER_TRAINING,
    BlockDiffusion,
    Experts,
    ModelConfig,
    expert_counts,
    head_size,
    layer_count,
    mixed_windows,
    parse_dense,
    periodic_windows,
    uniform_windows,
)
from quantkit.models.reader import ConfigReader
from quantkit.models.rope_config import RopeConfig, parse_longrope, parse_rope
from quantkit.ops.rows import CLAMPED_GAIN


def _reader(config: Mapping[str, Any], family: str, unbiased: tuple[str, ...] = ()) -> ConfigReader:
    """Reads the config of a family whose Linears named in ``unbiased`` have no biases."""
    reader = ConfigReader(config, f"config.json of a {family} model")
    for key in unbiased:
        reader.only(key, (False,))
    return reader


def _parse_llama(config: Mapping[str, Any]) -> ModelConfig:
    """Llama, https://arxiv.org/abs/2302.13971, and the models made like it (SmolLM2, TinyLlama, …).
    ``attention_bias`` means all four projections of attention, ``mlp_bias`` all three of the MLP."""
    reader = _reader(config, "llama")
    bias = reader.flag("attention_bias")
    return parse_dense(reader, "llama", windows=uniform_windows(reader, None), qkv_bias=bias, o_bias=bias,
                       mlp_bias=reader.flag("mlp_bias"))


def _parse_internlm3(config: Mapping[str, Any]) -> ModelConfig:
    """InternLM3: Llama's layers. ``qkv_bias`` and ``bias`` are names for Llama's ``attention_bias`` and
    ``mlp_bias``, and have one value, as transformers requires."""
    reader = _reader(config, "internlm3")
    bias = reader.flag("attention_bias", reader.flag("qkv_bias"))
    for key in ("qkv_bias", "mlp_bias", "bias"):
        reader.only(key, (bias,))
    return parse_dense(reader, "internlm3", windows=uniform_windows(reader, None), qkv_bias=bias, o_bias=bias,
                       mlp_bias=bias, kv_heads=2, max_positions=32768, head_dim=128, eps=1e-5)


def _parse_iquestcoder(config: Mapping[str, Any]) -> ModelConfig:
    """IQuest-Coder: Llama's layers, with heads of 128 unless ``head_dim`` is given."""
    reader = _reader(config, "iquestcoder")
    bias = reader.flag("attention_bias")
    return parse_dense(reader, "iquestcoder", windows=uniform_windows(reader, None), qkv_bias=bias,
                       o_bias=bias, mlp_bias=reader.flag("mlp_bias"), kv_heads=8, max_positions=131_072,
                       head_dim=128)


def _parse_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """Mistral 7B, https://arxiv.org/abs/2310.06825: Llama's layers with a sliding window in each. A missing
    ``sliding_window`` means 4096, null means none: that is what transformers reads."""
    reader = _reader(config, "mistral", ("attention_bias", "mlp_bias"))
    window = None if reader.null("sliding_window") else reader.integer("sliding_window", 4096)
    return parse_dense(reader, "mistral", windows=uniform_windows(reader, window), qkv_bias=False,
                       o_bias=False, kv_heads=8, max_positions=4096 * 32)


def _parse_ministral(config: Mapping[str, Any]) -> ModelConfig:
    """Ministral 8B of 2024: Mistral's layers, of which those that ``layer_types`` calls so have the window;
    without that list all."""
    reader = _reader(config, "ministral", ("attention_bias", "mlp_bias"))
    window = None if reader.null("sliding_window") else reader.integer("sliding_window", 4096)
    every = layer_count(reader) + 1
    return parse_dense(reader, "ministral", windows=periodic_windows(reader, window, every), qkv_bias=False,
                       o_bias=False, kv_heads=8, max_positions=4096 * 32)


def _parse_mixtral(config: Mapping[str, Any]) -> ModelConfig:
    """Mixtral, https://arxiv.org/abs/2401.04088: Mistral's layers with experts in place of every MLP. A
    missing ``sliding_window`` means none. The chosen experts' weights sum to 1."""
    reader = _reader(config, "mixtral", ("attention_bias", "mlp_bias"))
    positions = 4096 * 32
    stored = reader.raw("sliding_window")
    window = None if stored is None else reader.integer("sliding_window")
    count, chosen = expert_counts(reader, 8, 2)
    experts = Experts(count, chosen, reader.integer("intermediate_size"), True, (True,) * layer_count(reader),
                      "block_sparse_moe", ("w1", "w3", "w2"))
    rope = parse_rope(reader, reader.integer("max_position_embeddings", positions), 1e6)
    return parse_dense(reader, "mixtral", windows=uniform_windows(reader, window), qkv_bias=False,
                       o_bias=False, kv_heads=8, max_positions=positions, eps=1e-5, rope=rope,
                       ignored=ROUTER_TRAINING, experts=experts)


def _parse_phi3(config: Mapping[str, Any]) -> ModelConfig:
    """Phi-3, https://arxiv.org/abs/2404.14219, and Phi-4: q, k and v are one Linear, gate and up another. A
    missing ``sliding_window`` means none. Some sizes rotate a share of each head only."""
    reader = _reader(config, "phi3", ("attention_bias", "mlp_bias", "lm_head_bias"))
    positions = 4096
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.only(key, (1,))
    stored = reader.raw("sliding_window")
    window = None if stored is None else reader.integer("sliding_window")
    rope = parse_longrope(reader, reader.integer("max_position_embeddings", positions), head_size(reader),
                          positions)
    return parse_dense(reader, "phi3", windows=uniform_windows(reader, window), qkv_bias=False, o_bias=False,
                       max_positions=positions, eps=1e-5, rope=rope, fused_projections=True)


def _parse_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen2 and Qwen2.5, https://arxiv.org/abs/2407.10671: biases on q, k and v only. So has MiMo,
    https://arxiv.org/abs/2505.07608, whose files hold a head that drafts further tokens too. Windows follow
    ``layer_types``, or ``use_sliding_window`` with ``max_window_layers``."""
    family = str(config["model_type"])
    reader = _reader(config, family)
    reader.only("attention_bias", (True,))
    reader.only("mlp_bias", (False,))
    reader.only("use_mrope", (False,))
    windows = mixed_windows(reader, default_window=4096, default_full_layers=28)
    return parse_dense(reader, family, windows=windows, qkv_bias=True, o_bias=False, kv_heads=32,
                       max_positions=32768)


def _parse_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen3, https://arxiv.org/abs/2505.09388: queries and keys are normalized a head, heads are wide.
    ``head_dim`` is 128 unless given: it is not ``hidden_size / num_attention_heads``."""
    return _qwen3(_reader(config, "qwen3", ("mlp_bias",)), "qwen3")


def _qwen3(reader: ConfigReader, family: str, **differences: Any) -> ModelConfig:
    bias = reader.flag("attention_bias")
    windows = mixed_windows(reader, default_window=4096, default_full_layers=28)
    return parse_dense(reader, family, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True,
                       kv_heads=32, max_positions=32768, head_dim=128, **differences)


def _parse_sdar(config: Mapping[str, Any]) -> ModelConfig:
    """SDAR, https://arxiv.org/abs/2510.06303: Qwen3's layers, trained to write blocks of 4 tokens, or of as
    many as ``block_size`` says."""
    reader = _reader(config, "sdar", ("mlp_bias", "use_sliding_window"))
    diffusion = _blocks(reader, 4, 151_669, confidence=0.85)
    return _qwen3(reader, "sdar", diffusion=diffusion, ignored=SDAR_TRAINING)


def _blocks(reader: ConfigReader, size: int, mask: int | None, **how: Any) -> BlockDiffusion:
    """Blocks of ``size`` tokens unless the config says another; ``how`` they are written."""
    diffusion = BlockDiffusion(reader.integer("block_size", size), reader.integer("mask_token_id", mask),
                               **how)
    if PAGE % diffusion.block_size:
        raise reader.wrong("block_size", diffusion.block_size, f"it must divide {PAGE}, a page of a KV cache")
    if diffusion.mask_token >= reader.integer("vocab_size"):
        raise reader.wrong("mask_token_id", diffusion.mask_token, "it must be an id of the vocabulary")
    return diffusion


def _parse_a2d(config: Mapping[str, Any]) -> ModelConfig:
    """Llama, Qwen2 and Qwen3 as dLLM converts them, https://github.com/ZHZisZZ/dllm. Their configs say
    neither whether they write blocks or whole answers, nor the mask, so that both must have been added."""
    family = str(config["model_type"])
    reader = _reader(config, family, ("mlp_bias", "use_sliding_window"))
    for key in ("block_size", "mask_token_id"):
        if reader.raw(key) is None:
            raise reader.wrong(key, None, "the config must say it: the model's card tells whether it was "
                                          "trained for blocks (bd3lm, of 32 tokens) or for whole answers "
                                          "(mdlm), which isn't implemented, its tokenizer the mask")
    diffusion = _blocks(reader, 32, None, even=True)
    if family == "a2d-qwen3":
        return _qwen3(reader, family, diffusion=diffusion)
    if family == "a2d-llama":
        bias = reader.flag("attention_bias")
        return parse_dense(reader, family, windows=uniform_windows(reader, None), qkv_bias=bias, o_bias=bias,
                           diffusion=diffusion)
    reader.only("attention_bias", (True,))
    for key in ("sliding_window", "max_window_layers"):  # of windows that there aren't
        reader.raw(key)
    return parse_dense(reader, family, windows=uniform_windows(reader, None), qkv_bias=True, o_bias=False,
                       kv_heads=32, max_positions=32768, diffusion=diffusion)


def _parse_qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen3's mixtures of experts, https://arxiv.org/abs/2505.09388. Every ``decoder_sparse_step``-th layer
    has experts, but for those in ``mlp_only_layers``. A window is all layers', or nobody's."""
    reader = _reader(config, "qwen3_moe", ("mlp_bias",))
    bias = reader.flag("attention_bias")
    enabled = reader.flag("use_sliding_window") and not reader.null("sliding_window")
    window = reader.integer("sliding_window", 4096)
    reader.only("max_window_layers", (0,)) if enabled else reader.raw("max_window_layers")
    return parse_dense(reader, "qwen3_moe", windows=uniform_windows(reader, window if enabled else None),
                       qkv_bias=bias, o_bias=bias, qk_norm=True, kv_heads=4, max_positions=32768,
                       ignored=ROUTER_TRAINING, experts=_qwen_experts(reader, (128, 8, 768)))


def _qwen_experts(reader: ConfigReader, defaults: tuple[int, int, int],
                  shared: int = 0) -> Experts | None:
    """``defaults``: the number of experts, of those that a token gets, and their size."""
    count, chosen = expert_counts(reader, *defaults[:2])
    every, layers = reader.integer("decoder_sparse_step", 1), layer_count(reader)
    dense = reader.raw("mlp_only_layers", []) or []
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
        raise reader.wrong("mlp_only_layers", dense, f"it must list layers from 0 to {layers - 1}")
    routed = tuple((index + 1) % every == 0 and index not in dense for index in range(layers))
    size, normalized = reader.integer("moe_intermediate_size", defaults[2]), reader.flag("norm_topk_prob")
    experts = Experts(count, chosen, size, normalized, routed, shared_size=shared)
    return experts if any(routed) else None


def _parse_qwen2_moe(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen 1.5's and Qwen2's mixtures of experts, https://arxiv.org/abs/2407.10671: Qwen2's layers, with a
    shared expert beside the chosen ones."""
    reader = _reader(config, "qwen2_moe", ("mlp_bias", "use_sliding_window"))
    reader.only("qkv_bias", (True,))
    for key in ("sliding_window", "max_window_layers"):  # of windows that there aren't
        reader.raw(key)
    experts = _qwen_experts(reader, (60, 4, 1408), reader.integer("shared_expert_intermediate_size", 5632))
    return parse_dense(reader, "qwen2_moe", windows=uniform_windows(reader, None), qkv_bias=True,
                       o_bias=False, kv_heads=16, max_positions=32768, ignored=ROUTER_TRAINING,
                       experts=experts)


PAGE = 64
"""Blocks don't go across pages of the KV cache."""
SDAR_TRAINING = ("attn_implementation", "debug", "ep_size", "fuse_cross_entropy", "micro_forward",
                 "skip_checkpoint", "use_deepep")
"""Keys of published configs that say how it was trained."""
GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096}
"""Where a config of gpt-oss has no table, as transformers takes it."""


def _parse_gpt_oss(config: Mapping[str, Any]) -> ModelConfig:
    """gpt-oss, https://arxiv.org/abs/2508.10925: experts in every layer, with biases and a clamped
    activation, attention sinks, and a window in every second layer: ``layer_types`` if given, else layers 0,
    2, …. The chosen experts' weights sum to 1."""
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = {**config, "rope_parameters": dict(GPT_OSS_ROPE)}
    reader = _reader(config, "gpt_oss")
    positions = 131_072
    if reader.null("sliding_window"):
        raise reader.wrong("sliding_window", None, "layers of this family have a window")
    reader.only("mlp_bias", (True,))
    reader.only("swiglu_alpha", (CLAMPED_GAIN,))
    bias = reader.flag("attention_bias", True)
    count, chosen = expert_counts(reader, 128, 4)
    reader.only("experts_per_token", (chosen,))  # its older name, beside the new one
    experts = Experts(count, chosen, reader.integer("intermediate_size"), True, (True,) * layer_count(reader),
                      router="router", router_bias=True)
    rope = parse_rope(reader, reader.integer("max_position_embeddings", positions), 150_000.0)
    reader.only("initial_context_length", (rope.original_max_positions,))
    return parse_dense(
        reader, "gpt_oss", windows=periodic_windows(reader, reader.integer("sliding_window", 128), 2),
        qkv_bias=bias, o_bias=bias, mlp_bias=True, kv_heads=8, max_positions=positions, head_dim=64,
        eps=1e-5, rope=rope, ignored=ROUTER_TRAINING, experts=experts, activation="clamped_silu",
        activation_limit=reader.number("swiglu_limit", 7.0), attention_sinks=True)


GEMMA_HEAD = 256
GEMMA3_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8}
"""Published configs of Gemma 3 leave these out."""


def _parse_gemma2(config: Mapping[str, Any]) -> ModelConfig:
    """Gemma 2, https://arxiv.org/abs/2408.00118: norms on both sides, capped scores, a window in every second
    layer from the first on. A missing cap has a value, null is none."""
    reader = _reader(config, "gemma2")
    caps = [reader.number(key, default) if config.get(key, default) is not None else None
            for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))]
    return _parse_gemma(reader, "gemma2", period=2, positions=8192, attention_cap=caps[0], logit_cap=caps[1])


def _parse_gemma3_text(config: Mapping[str, Any]) -> ModelConfig:
    """Gemma 3's text model, https://arxiv.org/abs/2503.19786: Gemma 2's layers, normalized queries and keys
    in place of capped scores. Every ``sliding_window_pattern``-th layer sees everything and has the global
    rope; the others have a window and a rope of their own."""
    config = GEMMA3_DEFAULTS | {key: value for key, value in config.items() if value is not None}
    reader = _reader(config, "gemma3_text")
    positions = 131_072
    reader.only("attn_logit_softcapping", ())
    rope, local = _gemma3_ropes(reader, reader.integer("max_position_embeddings", positions))
    period = reader.integer("_sliding_window_pattern", 6)  # how transformers writes it
    cap = reader.raw("final_logit_softcapping")
    return _parse_gemma(reader, "gemma3_text", period=reader.integer("sliding_window_pattern", period),
                        positions=positions, attention_cap=None, qk_norm=True, rope=rope, local_rope=local,
                        logit_cap=None if cap is None else reader.number("final_logit_softcapping"))


def _parse_gemma(reader: ConfigReader, model_type: str, *, period: int, positions: int,
                 attention_cap: float | None, logit_cap: float | None, **differences: Any) -> ModelConfig:
    """What Gemma 2 and 3 share.

    Args:
        reader: reads the config.
        model_type: the family's name.
        period: every ``period``-th layer has no window, unless ``layer_types`` says otherwise.
        positions: the context where ``max_position_embeddings`` is missing.
        attention_cap, logit_cap: caps on scores and logits.
        differences: arguments for :func:`~quantkit.models.config.parse_dense`.

    Raises:
        UnsupportedModelError: as parse_dense.
    """
    for key in ("hidden_act", "hidden_activation"):
        reader.only(key, ("gelu_pytorch_tanh",))
    reader.only("use_bidirectional_attention", (False,))
    reader.only("mlp_bias", (False,))
    bias, window = reader.flag("attention_bias"), reader.integer("sliding_window", 4096)
    reader.only("sliding_window_size", (window,))  # its older name, beside the new one
    scalar, dim = reader.number("query_pre_attn_scalar", 256), reader.integer("head_dim", GEMMA_HEAD)
    return parse_dense(
        reader, model_type, windows=periodic_windows(reader, window, period), qkv_bias=bias, o_bias=bias,
        kv_heads=4, max_positions=positions, head_dim=GEMMA_HEAD, tied=True,
        ignored=("cache_implementation",), activation="gelu_tanh", sandwich_norms=True, offset_norms=True,
        embedding_scale=reader.integer("hidden_size")**0.5,
        attention_scale=None if scalar == dim else scalar**-0.5, attention_softcap=attention_cap,
        logit_softcap=logit_cap, **differences)


def _gemma3_ropes(reader: ConfigReader, positions: int) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers without a window, and of those with one, in the spelling of transformers 4 or 5."""
    tables, local = reader.raw("rope_parameters"), reader.raw("rope_local_base_freq")
    theta, local_theta = 1e6, 1e4
    if tables is None:
        sliding = RopeConfig(reader.number("rope_local_base_freq", local_theta))
        return parse_rope(reader, positions, theta), sliding
    reader.only("rope_scaling", ())
    kinds = {"full_attention": (reader.raw("rope_theta"), theta), "sliding_attention": (local, local_theta)}
    if not isinstance(tables, dict) or not set(tables) <= set(kinds):
        raise reader.wrong("rope_parameters", tables, f"it must have a table each for {' and '.join(kinds)}")
    full, sliding = (
        parse_rope(ConfigReader({"rope_parameters": tables.get(kind), "rope_theta": given},
                                f"{reader.where}, {kind}"), positions, default)
        for kind, (given, default) in kinds.items())
    return full, sliding


LLAMA = Architecture("llama", ("LlamaForCausalLM",), _parse_llama)
INTERNLM3 = Architecture("internlm3", ("InternLM3ForCausalLM", "LlamaForCausalLM"),
                         _parse_internlm3)
IQUESTCODER = Architecture("iquestcoder", ("IQuestCoderForCausalLM", "LlamaForCausalLM"),
                           _parse_iquestcoder)
MINISTRAL = Architecture("ministral", ("MinistralForCausalLM",), _parse_ministral)
MISTRAL = Architecture("mistral", ("MistralForCausalLM",), _parse_mistral)
MIXTRAL = Architecture("mixtral", ("MixtralForCausalLM",), _parse_mixtral)
PHI3 = Architecture("phi3", ("Phi3ForCausalLM",), _parse_phi3)
QWEN2 = Architecture("qwen2", ("Qwen2ForCausalLM",), _parse_qwen2)
MIMO = Architecture("mimo", ("MiMoForCausalLM",), _parse_qwen2)
QWEN2_MOE = Architecture("qwen2_moe", ("Qwen2MoeForCausalLM",), _parse_qwen2_moe)
QWEN3 = Architecture("qwen3", ("Qwen3ForCausalLM",), _parse_qwen3)
SDAR = Architecture("sdar", ("SDARForCausalLM",), _parse_sdar)
A2D_LLAMA = Architecture("a2d-llama", ("A2DLlamaLMHeadModel",), _parse_a2d)
A2D_QWEN2 = Architecture("a2d-qwen2", ("A2DQwen2LMHeadModel",), _parse_a2d)
A2D_QWEN3 = Architecture("a2d-qwen3", ("A2DQwen3LMHeadModel",), _parse_a2d)
QWEN3_MOE = Architecture("qwen3_moe", ("Qwen3MoeForCausalLM",), _parse_qwen3_moe)
GPT_OSS = Architecture("gpt_oss", ("GptOssForCausalLM",), _parse_gpt_oss)
GEMMA2 = Architecture("gemma2", ("Gemma2ForCausalLM",), _parse_gemma2)
GEMMA3_TEXT = Architecture("gemma3_text", ("Gemma3ForCausalLM",), _parse_gemma3_text)
