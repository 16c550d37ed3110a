"""What GGUF's architectures are in Hugging Face's terms: names of tensors and settings, and what conversion
to GGUF did to the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.sources.gguf_metadata import GGUFMetadata

_LINEARS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
               "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@dataclass(frozen=True)
class GGUFFamily:
    """An architecture.

    Attributes:
        model_class, model_type: in ``config.json``.
        tensors: of a layer: GGUF's name → Hugging Face's.
        interleaved: whether the rows of q and k are in the order of GGUF's own RoPE.
        norm_offset: what the file's norm weights are above Hugging Face's.
        settings: the metadata and the head dimension → what ``config.json`` has beside that of all.
        keys: that these read beside those of all.
        windowed: whether its settings say which layers have a window.
    """

    model_class: str
    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: _LINEARS | _TWO_NORMS)
    interleaved: bool = False
    norm_offset: float = 0.0
    settings: Callable[[GGUFMetadata, int], dict[str, Any]] = lambda meta, dim: {"hidden_act": "silu"}
    keys: frozenset[str] = frozenset()
    windowed: bool = False


def _gemma2(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """Scores are scaled by the head dimension, but in 27B, by its 46 layers, by hidden size over heads."""
    return _gemma(meta, dim, period=2, layers_of_27b=46) | {
        "sliding_window": meta.integer(_WINDOW, 4096),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0)}


def _gemma3(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """Layers with a window have a rope of their own, which older files don't write."""
    settings = _gemma(meta, dim, period=6, layers_of_27b=62) | {
        "sliding_window": meta.integer(_WINDOW),
        "rope_local_base_freq": meta.real("rope.freq_base_swa", 10000.0)}
    if meta.raw("final_logit_softcapping") is not None:
        settings["final_logit_softcapping"] = meta.real("final_logit_softcapping")
    return settings


def _gemma(meta: GGUFMetadata, dim: int, period: int, layers_of_27b: int) -> dict[str, Any]:
    layers = meta.integer("block_count")
    scalar = dim if layers != layers_of_27b else (
        meta.integer("embedding_length") // meta.integer("attention.head_count"))
    pattern = meta.layers(_PATTERN)
    if not isinstance(pattern, list):
        period, pattern = meta.integer(_PATTERN, period), None
    elif len(pattern) != layers or not all(type(windowed) is bool for windowed in pattern):
        raise meta.bad(_PATTERN, pattern, f"a number, or yes or no for each of {layers} layers, is needed")
    windows = pattern or [(index + 1) % period != 0 for index in range(layers)]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar,
            "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in windows]}


FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3", _LINEARS | _TWO_NORMS | _HEAD_NORMS),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", _LINEARS | _FOUR_NORMS, norm_offset=1.0,
                         settings=_gemma2, windowed=True,
                         keys=frozenset({_PATTERN, "attn_logit_softcapping", "final_logit_softcapping"})),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", _LINEARS | _FOUR_NORMS | _HEAD_NORMS,
                         norm_offset=1.0, settings=_gemma3, windowed=True,
                         keys=frozenset({_PATTERN, "rope.freq_base_swa", "final_logit_softcapping"}))}
"""By ``general.architecture``."""
