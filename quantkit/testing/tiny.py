"""Tiny random models with a tokenizer: made in milliseconds, without a network or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.sources.split_experts import interleaved
from quantkit.support.errors import UsageError, did_you_mean

_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                          "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **_GEMMA, "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 10.0},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **_GEMMA, "sliding_window_pattern": 2,
                    "rope_theta": 100000.0, "rope_local_base_freq": 10000.0},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "sliding_window": 24, "head_dim": 16,
                "num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 64,
                "attention_bias": True, "swiglu_limit": 7.0, "rope_theta": 150000.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                 "truncate": False, "original_max_position_embeddings": 64}},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "head_dim": 16, "attention_bias": False},
    "iquestcoder": {"architectures": ["IQuestCoderForCausalLM"], "head_dim": 16, "attention_bias": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mimo": {"architectures": ["MiMoForCausalLM"], "use_sliding_window": False, "sliding_window": None,
             "max_window_layers": 2, "num_nextn_predict_layers": 1},
    "ministral": {"architectures": ["MinistralForCausalLM"], "sliding_window": 24, "head_dim": 16},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 16},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_local_experts": 4,
                "num_experts_per_tok": 2, "intermediate_size": 64},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None, "pad_token_id": 0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 2},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": False,
                  "sliding_window": None, "num_experts": 6, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
                  "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 2, "head_dim": 32, "attention_bias": False},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": False,
                  "sliding_window": None, "head_dim": 32, "attention_bias": False, "num_experts": 6,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
}
# the last token of the vocabulary stands for those that aren't known
_BLOCKS: dict[str, Any] = {"block_size": 4, "mask_token_id": 299}
BLOCK_FAMILIES: dict[str, dict[str, Any]] = {
    "a2d-llama": {"architectures": ["A2DLlamaLMHeadModel"], **_BLOCKS, "attention_bias": False,
                  "mlp_bias": False},
    "a2d-qwen2": {"architectures": ["A2DQwen2LMHeadModel"], **_BLOCKS, "use_sliding_window": False,
                  "sliding_window": None, "max_window_layers": 2},
    "a2d-qwen3": {"architectures": ["A2DQwen3LMHeadModel"], **_BLOCKS, "use_sliding_window": False,
                  "sliding_window": None, "max_window_layers": 2, "head_dim": 32, "attention_bias": False},
    "sdar": {"architectures": ["SDARForCausalLM"], **_BLOCKS, "use_sliding_window": False,
             "sliding_window": None, "max_window_layers": 2, "head_dim": 32, "attention_bias": False},
}
"""Families that write blocks of tokens."""
SPECIAL = ("<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġ a", "i n", "e r", "Ġt he", "o n", "r e", "Ġ s", "a t", "n d", "Ġ w", "Ġ o", "o u",
          "e n", "i s", "o r", "Ġ c", "in g", "e s", "e d", "Ġa nd", "i t", "Ġ f", "a n", "Ġ in", "Ġ b",
          "a l", "Ġ p", "Ġt o", "Ġ h", "Ġ m", "a r", "i c", "Ġo f", "Ġ d", "l l", "Ġ is", "a s", "l e")
VOCAB = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + "
    "'\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def tiny_model(folder: Path | str, family: str = "llama", seed: int = 0, *, dtype: str = "bfloat16",
               **overrides: Any) -> Path:
    """Write a tiny random model as a Hugging Face folder; needs neither a network nor transformers.

    Two layers, hidden size 64, four heads on two key-value heads, a byte-level tokenizer of 300 tokens.
    Weights are scaled so that logits differ by a few units, as a trained model's do.

    Args:
        folder: made if missing; files of the same names are overwritten.
        family: one of :data:`FAMILIES`, or of those that write blocks: ``sdar``, ``a2d-qwen3`` and so on.
        seed: a number; with the same one the bytes are the same.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        overrides: keys of ``config.json``; ``None`` writes null.

    Returns:
        The folder, holding ``config.json``, ``model.safetensors``, ``tokenizer.json``,
        ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        UsageError: the family is unknown.
        UnsupportedModelError: the overrides make a model that quantkit can't run.
    """
    config = tiny_config(family, dtype=dtype, **overrides)
    weights = tiny_weights(config, seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(joined_experts(weights) if family == "gpt_oss" else weights, folder / "model.safetensors",
              metadata={"format": "pt"})
    tiny_tokenizer(adds_bos=_adds_bos(family)).save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", _tokenizer_config(family))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [3, 0], "pad_token_id": 0})
    return folder


def tiny_config(family: str = "llama", *, dtype: str = "bfloat16", **overrides: Any) -> dict[str, Any]:
    """The ``config.json`` of :func:`tiny_model`. Raises UsageError if the family is unknown."""
    known = FAMILIES | BLOCK_FAMILIES
    if family not in known:
        raise UsageError(f"no tiny model of family {family!r}", why=did_you_mean(family, known))
    return {
        "model_type": family, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 3,
        "pad_token_id": 0, "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0,
        **known[family], **overrides}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors for a ``config.json``, in its ``torch_dtype``, by their Hugging Face names."""
    dtype = getattr(torch, str(config.get("torch_dtype", "float32")))
    return random_weights(parse_config(config), dtype, seed)


def random_weights(parsed: ModelConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors for a model, by their Hugging Face names; norms near 1."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(parsed).items():
        value = torch.randn(shape, generator=random)
        if name.endswith("norm.weight"):
            value = (not parsed.offset_norms) + 0.1 * value
            if parsed.sandwich_norms and ".post_" in name:
                value += 3  # or the large embeddings would drown what the layers add
        elif name.endswith(".bias"):
            value = 0.1 * value
        else:
            value = value * (2.0 if "embed" in name or "lm_head" in name else 1.0) * shape[-1] ** -0.5
        weights[name] = value.to(dtype)
    return weights


def joined_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A gpt_oss model's tensors as its files have them: those of a layer's experts as one
    (:mod:`quantkit.sources.split_experts`)."""
    joined: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in weights.items():
        place, inside, expert = name.partition(".experts.")
        if inside:
            experts.setdefault(f"{place}.experts", {}).setdefault(expert.partition(".")[2], []).append(tensor)
        else:
            joined[name] = tensor
    for place, parts in experts.items():
        for part, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (torch.stack(parts[f"{name}_proj.{part}"]) for name in ("gate", "up", "down"))
            for projection, fused in (("gate_up_proj", interleaved(gate, up)), ("down_proj", down)):
                joined[f"{place}.{projection}{suffix}"] = (fused if part == "bias" else fused.mT).contiguous()
    return joined


def tiny_tokenizer(adds_bos: bool = True) -> Tokenizer:
    """A byte-level BPE of :data:`VOCAB` tokens: any text round-trips, common English pairs merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet, *("".join(m.split(" ")) for m in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)},
                                     merges=[(m.split(" ")[0], m.split(" ")[1]) for m in MERGES]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    return tokenizer


def _adds_bos(family: str) -> bool:
    """Llama's, Mistral's and Gemma's tokenizers put a BOS in front, Phi's and Qwen's don't."""
    return family.startswith(("llama", "mi", "gemma"))


def _tokenizer_config(family: str) -> dict[str, Any]:
    bos = _adds_bos(family)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>" if bos else None,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": bos,
            "model_max_length": 512, "clean_up_tokenization_spaces": False,
            "chat_template": ("{{ bos_token }}" if bos else "") + CHAT_TEMPLATE}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
