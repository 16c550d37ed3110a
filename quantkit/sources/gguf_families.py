"""What GGUF's architectures are in Hugging Face's terms: names of tensors and settings, and what conversion
to GGUF does to the weights. The table is read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.support.errors import SourceError

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside the layers, of all families: GGUF's name → Hugging Face's."""
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TABLES = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that config.json says as numbers: Llama 3.1's scaling, and LongRoPE's factors."""
EXPERT = "{expert}"
"""In a Hugging Face name: the number of an expert. GGUF has one tensor of all, the expert outermost."""
_SPLIT_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                    "attn_output": "self_attn.o_proj"}
_SPLIT_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
          "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_inp": "block_sparse_moe.gate",
                    "ffn_gate_exps": f"block_sparse_moe.experts.{EXPERT}.w1",
                    "ffn_up_exps": f"block_sparse_moe.experts.{EXPERT}.w3",
                    "ffn_down_exps": f"block_sparse_moe.experts.{EXPERT}.w2"}
_QWEN_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_exps": f"mlp.experts.{EXPERT}.gate_proj",
                 "ffn_up_exps": f"mlp.experts.{EXPERT}.up_proj",
                 "ffn_down_exps": f"mlp.experts.{EXPERT}.down_proj"}
_OSS_EXPERTS = {**_QWEN_EXPERTS, "ffn_gate_inp": "mlp.router"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OSS_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
               "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SINKS = {"attn_sinks": "self_attn.sinks"}
BARE = frozenset(_SINKS.values())
"""Hugging Face's names that are a tensor's whole; GGUF writes ``.weight`` behind its own."""
_LINEARS = _SPLIT_ATTENTION | _SPLIT_MLP
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_MAX_LAYERS = 4096
"""More is a malformed file, not a model."""
_LLAMA_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
HF_FOLDER = "give the model's Hugging Face folder instead"
MAX_INT, HUGE = 2**31 - 1, 1e30


def decimal(value: float) -> float:
    """The shortest decimal number that float32 stores as this: 9.999999747378752e-06 was written as 1e-5."""
    return float(str(np.float32(value)))


class GGUFMetadata:
    """``{architecture}.*``.

    Args:
        metadata: the keys of the whole file.
        where: the file's name, for errors.
        architecture: the architecture whose keys are read.
        known: keys that are read, or say nothing about the maths.

    Raises:
        SourceError: another key of the architecture.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str, architecture: str, known: Set[str]) -> None:
        self.metadata = metadata
        self.where = where
        self.architecture = architecture
        prefix = f"{architecture}."
        mine = {key.removeprefix(prefix) for key in metadata if key.startswith(prefix)}
        if unknown := sorted(mine - known):
            raise SourceError(f"{where} sets {prefix}{unknown[0][:80]}",
                              why="it may change the model's maths, and quantkit doesn't know it",
                              next=HF_FOLDER)

    def bad(self, key: str, value: Any, why: str) -> SourceError:
        """The error of a value that can't be taken."""
        return SourceError(f"{self.where}: {self.architecture}.{key} is {str(value)[:80]!r}", why=why,
                           next=HF_FOLDER)

    def layers(self, key: str) -> Any:
        """The value as it is: one, or a list with one a layer."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def raw(self, key: str) -> Any:
        """The value; a list with one value a layer counts as that value if all are equal."""
        value = self.layers(key)
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise self.bad(key, value, "layers that differ are not supported")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least``; without a default it must be there."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise SourceError(f"{self.where} has no {self.architecture}.{key}",
                                  why="the model can't be built without it", next="use another conversion")
            return default
        if type(value) is not int or not least <= value <= MAX_INT:
            raise self.bad(key, value, f"a whole number from {least} is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0. As float32 stores it: 1e-5 is 9.999999747378752e-06 there."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < HUGE:
            raise self.bad(key, value, f"a number above 0 and below {HUGE:g} is needed")
        return float(value)


def _silu(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    return {"hidden_act": "silu"}


@dataclass(frozen=True)
class GGUFFamily:
    """A family of models as GGUF stores it.

    Attributes:
        architecture: the value of ``general.architecture``.
        model_class, model_type: in ``config.json``.
        tensors: GGUF's names of a layer's weights and biases → Hugging Face's, with :data:`EXPERT` in those
            that GGUF has as one tensor of all experts.
        permuted: tensors whose rows are in the order of GGUF's own RoPE, interleaved a head, → the key of
            ``config.json`` with their number of heads.
        norm_offset: how much the file's norm weights are above Hugging Face's.
        settings: the metadata and the head dimension → what ``config.json`` has beside that of all.
        keys: the keys that these read beside those of all families.
        windowed: whether its settings say which layers have a window.
        freqs_table: whether Llama 3.1's scaling of the RoPE may be there, as ``rope_freqs``.
        longrope: whether the RoPE may be LongRoPE, with tables of its factors, and may turn a share of each
            head; other scalings aren't in this family then.
        truncate: whether yarn's ramp starts and ends at whole dimensions, which no key says.
    """

    architecture: str
    model_class: str
    model_type: str
    tensors: Mapping[str, str]
    permuted: Mapping[str, str]
    norm_offset: float = 0.0
    settings: Callable[[GGUFMetadata, int], dict[str, Any]] = _silu
    keys: frozenset[str] = frozenset()
    windowed: bool = False
    freqs_table: bool = False
    longrope: bool = False
    truncate: bool = True

    @property
    def experts(self) -> bool:
        """Whether its layers have experts in place of an MLP."""
        return any(EXPERT in name for name in self.tensors.values())


def _mixtral(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    return _silu(meta, dim) | {"num_local_experts": meta.integer("expert_count"),
                               "num_experts_per_tok": meta.integer("expert_used_count"),
                               "sliding_window": None}


def _qwen3_moe(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """In this architecture every layer has experts, and the chosen ones' weights sum to 1."""
    chosen = meta.integer("expert_used_count")
    size = meta.integer("expert_feed_forward_length", max(meta.integer("feed_forward_length") // chosen, 1))
    return _silu(meta, dim) | {"num_experts": meta.integer("expert_count"), "num_experts_per_tok": chosen,
                               "moe_intermediate_size": size, "norm_topk_prob": True,
                               "decoder_sparse_step": 1, "mlp_only_layers": []}


def _gpt_oss(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """The key of experts' size alone counts for llama.cpp, whose clamp is always at 7."""
    return _silu(meta, dim) | {
        "intermediate_size": meta.integer("expert_feed_forward_length"),
        "num_local_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"), "swiglu_limit": 7.0,
        "sliding_window": meta.integer(_WINDOW), "layer_types": _layer_types(meta, 2),
        "rope_scaling": {"rope_type": "default"}}


def _phi3(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """A window is all layers'; converters write 0 where there is none."""
    return _silu(meta, dim) | {"sliding_window": meta.integer(_WINDOW, 0, least=0) or None}


def _gemma2(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """Scores are scaled by the head dimension, but in 27B, by its 46 layers, by hidden size over heads."""
    return _gemma(meta, dim, period=2, layers_of_27b=46) | {
        "sliding_window": meta.integer(_WINDOW, 4096),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0)}


def _gemma3(meta: GGUFMetadata, dim: int) -> dict[str, Any]:
    """Layers with a window have a rope of their own, which older files don't write. Without a window no layer
    has one, whatever the pattern."""
    settings = _gemma(meta, dim, period=6, layers_of_27b=62) | {
        "rope_local_base_freq": meta.real("rope.freq_base_swa", 10000.0)}
    if window := meta.integer(_WINDOW, 0, least=0):
        settings["sliding_window"] = window
    else:
        settings["layer_types"] = ["full_attention"] * meta.integer("block_count")
    if meta.raw("final_logit_softcapping") is not None:
        settings["final_logit_softcapping"] = meta.real("final_logit_softcapping")
    return settings


def _gemma(meta: GGUFMetadata, dim: int, period: int, layers_of_27b: int) -> dict[str, Any]:
    scalar = dim if meta.integer("block_count") != layers_of_27b else (
        meta.integer("embedding_length") // meta.integer("attention.head_count"))
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar,
            "layer_types": _layer_types(meta, period)}


def _layer_types(meta: GGUFMetadata, period: int) -> list[str]:
    """Which layers have a window: where the file doesn't list them, all but every ``period``-th, or another
    period that it names."""
    layers, pattern = meta.integer("block_count"), meta.layers(_PATTERN)
    if layers > _MAX_LAYERS:
        raise meta.bad("block_count", layers, f"no model has more than {_MAX_LAYERS:,} layers")
    if not isinstance(pattern, list):
        period, pattern = meta.integer(_PATTERN, period), None
    elif len(pattern) != layers or not all(type(windowed) is bool for windowed in pattern):
        raise meta.bad(_PATTERN, pattern, f"a number, or yes or no for each of {layers} layers, is needed")
    windows = pattern or [(index + 1) % period != 0 for index in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in windows]


FAMILIES = {family.model_type: family for family in (
    GGUFFamily("llama", "LlamaForCausalLM", "llama", _LINEARS | _TWO_NORMS, _LLAMA_PERMUTED,
               freqs_table=True),
    GGUFFamily("llama", "MixtralForCausalLM", "mixtral", _SPLIT_ATTENTION | _MIXTRAL_EXPERTS | _TWO_NORMS,
               _LLAMA_PERMUTED, settings=_mixtral, freqs_table=True),
    GGUFFamily("qwen2", "Qwen2ForCausalLM", "qwen2", _LINEARS | _TWO_NORMS, {}),
    GGUFFamily("qwen3", "Qwen3ForCausalLM", "qwen3", _LINEARS | _TWO_NORMS | _HEAD_NORMS, {}),
    GGUFFamily("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe",
               _SPLIT_ATTENTION | _QWEN_EXPERTS | _TWO_NORMS | _HEAD_NORMS, {}, settings=_qwen3_moe,
               keys=frozenset({"expert_feed_forward_length"})),
    GGUFFamily("gpt-oss", "GptOssForCausalLM", "gpt_oss",
               _SPLIT_ATTENTION | _SINKS | _OSS_EXPERTS | _OSS_NORMS, {}, settings=_gpt_oss, windowed=True,
               truncate=False, keys=frozenset({"expert_feed_forward_length", _PATTERN})),
    GGUFFamily("phi3", "Phi3ForCausalLM", "phi3", _FUSED | _TWO_NORMS, {}, settings=_phi3, windowed=True,
               longrope=True),
    GGUFFamily("gemma2", "Gemma2ForCausalLM", "gemma2", _LINEARS | _FOUR_NORMS, {}, norm_offset=1.0,
               settings=_gemma2, windowed=True,
               keys=frozenset({_PATTERN, "attn_logit_softcapping", "final_logit_softcapping"})),
    GGUFFamily("gemma3", "Gemma3ForCausalLM", "gemma3_text", _LINEARS | _FOUR_NORMS | _HEAD_NORMS, {},
               norm_offset=1.0, settings=_gemma3, windowed=True,
               keys=frozenset({_PATTERN, "rope.freq_base_swa", "final_logit_softcapping"})))}
"""By the ``model_type`` of ``config.json``. Mistral is written as ``llama``, from which it can't be told."""


OTHER_FILES = {
    "adapter": ("an adapter", "merge it into its model: "
                              "llama-export-lora -m MODEL.gguf --lora ADAPTER.gguf -o MERGED.gguf"),
    "imatrix": ("an importance matrix", "give the model's own file; recipes measure what they need"),
    "mmproj": ("what a model of images and text reads images with", "give the file of the language model")}
"""By ``general.type``: what else is in GGUF files."""


def family_of(metadata: Mapping[str, Any], where: str) -> GGUFFamily:
    """The family of ``general.architecture``; one of several by whether there are experts.

    Raises:
        SourceError: an unknown architecture, or a file that holds no model.
    """
    if (kind := str(metadata.get("general.type"))) in OTHER_FILES:
        what, remedy = OTHER_FILES[kind]
        raise SourceError(f"{where} is {what}, not a model", why=f"its general.type is {kind}", next=remedy)
    architecture = metadata.get("general.architecture")
    known = [family for family in FAMILIES.values() if family.architecture == architecture]
    if not known:
        name = str(architecture)[:80]
        names = dict.fromkeys(family.architecture for family in FAMILIES.values())
        raise SourceError(f"{where} holds a {name!r} model", why=f"known: {', '.join(sorted(names))}",
                          next="llama-server -m FILE.gguf runs it; of the safetensors files it was made of, "
                               "quantkit quantize MODEL --recipe int4 --out OUT makes a checkpoint for vllm")
    experts = bool(metadata.get(f"{architecture}.expert_count"))
    return next((family for family in known if family.experts == experts), known[0])
