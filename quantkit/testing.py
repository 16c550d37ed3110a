"""Tiny models for tests: real folders with every file that a model has, made in milliseconds."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from quantkit.errors import PluginError, QuantkitError, UsageError, did_you_mean
from quantkit.methods.base import LayerStats, Method
from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.plugins import registry
from quantkit.recipe import default_format
from quantkit.sources.base import ModelSource
from quantkit.sources.open import open_source
from quantkit.spec import Granularity, QuantSpec
from quantkit.transforms.base import LayerTensors, Transform

_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                          "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **_GEMMA, "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 10.0},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **_GEMMA, "sliding_window_pattern": 2,
                    "rope_theta": 100000.0, "rope_local_base_freq": 10000.0},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 16},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_local_experts": 4,
                "num_experts_per_tok": 2, "intermediate_size": 64},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None, "pad_token_id": 0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 2},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 2, "head_dim": 32, "attention_bias": False},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": False,
                  "sliding_window": None, "head_dim": 32, "attention_bias": False, "num_experts": 6,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
}
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
        family: one of :data:`FAMILIES`.
        seed: the same seed gives the same bytes.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        overrides: keys of ``config.json``; ``None`` writes null.

    Returns:
        The folder, holding ``config.json``, ``model.safetensors``, ``tokenizer.json``,
        ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        UsageError: the family is unknown.
        UnsupportedModelError: the overrides make a model that quantkit can't run.
    """
    if family not in FAMILIES:
        raise UsageError(f"no tiny model of family {family!r}", why=did_you_mean(family, FAMILIES))
    config: dict[str, Any] = {
        "model_type": family, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 3,
        "pad_token_id": 0, "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0,
        **FAMILIES[family], **overrides}
    weights = tiny_weights(config, seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(adds_bos=_adds_bos(family)).save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", _tokenizer_config(family))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [3, 0], "pad_token_id": 0})
    return folder


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors for a ``config.json``, in its ``torch_dtype``, by their Hugging Face names."""
    dtype = getattr(torch, str(config.get("torch_dtype", "float32")))
    random = torch.Generator().manual_seed(seed)
    weights = {}
    parsed = parse_config(config)
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


METHOD_SPECS = tuple(
    QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity, scale_dtype="bfloat16")
    for bits, symmetric, granularity in itertools.product(
        (4, 8), (True, False), (Granularity(strategy="channel"), Granularity(strategy="group", size=16)))
) + tuple(QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64), nested=nested,
                    scale_dtype="float32") for nested in (False, True)) + tuple(
    QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy=strategy), scale_dtype="bfloat16")
    for strategy in ("tensor", "channel")) + (
    QuantSpec(kind="trellis", bits=3, window=10, granularity=Granularity(strategy="channel"),
              scale_dtype="bfloat16"),)
"""What :func:`check_method` asks a method for, unless told otherwise."""


def check_method(method: Method, specs: Iterable[QuantSpec] = METHOD_SPECS) -> None:
    """Run a method as quantkit would and check every promise of ``quantkit.methods.base``.

    For each spec that the method doesn't refuse, and for ordinary and awkward weights: shapes and
    dtypes, finite and rounded scales, writing to no argument, leaving the global generator alone,
    the same result twice, and a result closer to the weight than nothing. NaN must be refused.

    Args:
        method: the method, with default options.
        specs: what it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec and the weight are named.
    """
    taken = [spec for spec in specs if method.refuses(spec) is None]
    if not taken:
        raise PluginError(f"method {method.name!r} refuses every spec that it was asked for")
    for spec in taken:
        rows = 64 if spec.kind == "trellis" else 1
        for name, weight in _method_weights(rows).items():
            _check_run(method, spec, weight, f"method {method.name!r} at {spec.label()}, weight {name!r}")
        weight = torch.full((64, 64), float("nan"))
        try:
            method.run(weight, _method_stats(), spec, method.options())
        except QuantkitError:
            continue
        raise PluginError(f"method {method.name!r} at {spec.label()} accepts a weight of NaN",
                          why="no engine can run this layer", next="raise quantkit.errors.SpecError")


def _method_weights(multiple: int) -> dict[str, torch.Tensor]:
    """Ordinary and awkward weights whose number of rows is a multiple of ``multiple``."""
    normal = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    outlier = normal.clone()
    outlier[3, 5] = 50.0
    weights = {"normal": normal, "one row": normal[:1].clone(), "zeros": torch.zeros(4, 64),
               "outlier": outlier, "equal": torch.full((4, 64), 0.25), "denormal": normal * 1e-39}
    return {name: weight.repeat(multiple // math.gcd(len(weight), multiple), 1)
            for name, weight in weights.items()}


def _method_stats() -> LayerStats:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    return LayerStats(256, x.T @ x / 256)


def _check_run(method: Method, spec: QuantSpec, weight: torch.Tensor, where: str) -> None:
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}", why="quantkit.methods.base says what a method promises")

    stats, fresh, before, random = _method_stats(), _method_stats(), weight.clone(), torch.get_rng_state()
    result = method.run(weight, stats, spec, method.options())
    assert stats.hessian is not None and fresh.hessian is not None
    must(torch.equal(weight, before) and torch.equal(stats.hessian, fresh.hessian),
         "it wrote to an argument")
    must(torch.equal(random, torch.get_rng_state()), "it used the global random generator")
    two = method.run(weight, stats, spec, method.options())
    must(torch.equal(result.codes, two.codes) and torch.equal(result.scale, two.scale), "two runs differ")
    must((result.zero is None) == (spec.symmetric or spec.kind != "int"),
         "zero points where the spec has none")
    must(result.zero is None or (result.zero.dtype == torch.uint8
                                 and result.zero.shape == result.scale.shape),
         "zero points must be uint8 of the scales' shape")
    dtype = getattr(torch, spec.scale_dtype)
    must(torch.equal(result.scale, result.scale.to(dtype).float()),
         f"scales are not rounded to {spec.scale_dtype}")
    must(spec.kind == "nf" or bool((result.scale > 0).all()), "a scale is not above 0")
    layout = registry("formats").get(default_format(spec))
    values = layout.dequantize(layout.pack(result, dtype))
    must(bool(torch.isfinite(values).all()), "a dequantized weight is not finite")
    must(float((values - weight).square().sum()) <= float(weight.square().sum()), "zeros would be closer")


SMALL_ERROR = 1e-4
"""Of logits of a few units, in float32: what is left when nothing but the order of sums has changed."""


def check_transform(transform: Transform, families: Iterable[str] = tuple(FAMILIES)) -> None:
    """Put a transform, with default options, to tiny models of every family that it doesn't refuse, and check
    what ``quantkit.transforms.base`` promises: the same logits, tensors as they are announced, the same
    result twice, nothing written to the model.

    Args:
        transform: the transform.
        families: which; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the family is named.
    """
    taken = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            source = open_source(str(tiny_model(folder, family, dtype="float32")))
            try:
                if transform.refuses(parse_config(source.config())) is None:
                    taken += 1
                    _check_transformed(transform, source, f"transform {transform.name!r} on {family}")
            finally:
                source.close()
    if not taken:
        raise PluginError(f"transform {transform.name!r} refuses every family that it was asked for")


def _check_transformed(transform: Transform, source: ModelSource, where: str) -> None:
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}",
                              why="quantkit.transforms.base says what a transform promises")

    config, options = parse_config(source.config()), transform.options()
    original = {name: source.tensor(name).clone() for name in source.tensors()}
    changed = transform.source(source, config, options)
    config, infos = parse_config(changed.config()), changed.tensors()
    tensors = {name: changed.tensor(name) for name in infos}
    must({name: info.shape for name, info in infos.items()} == tensor_shapes(config),
         "its tensors aren't those of its config")
    must(all((infos[name].dtype, infos[name].shape) == (tensor.dtype, tuple(tensor.shape))
             for name, tensor in tensors.items()), "a tensor isn't as it is announced")
    if transform.layer is not None:
        for index in range(config.num_layers):
            layers = [_transformed_layer(transform, changed, index) for _ in range(2)]
            must(layers[0].keys() == layers[1].keys() and all(torch.equal(layers[0][n], layers[1][n])
                                                              for n in layers[0]), "two runs differ")
            tensors |= layers[0]
    must(all(torch.equal(source.tensor(name), tensor) for name, tensor in original.items()),
         "it wrote to the model")
    difference = (_logits(changed.config(), tensors) - _logits(source.config(), original)).abs().max()
    must(bool(difference < SMALL_ERROR), f"logits differ by {float(difference):.2g}")


def _transformed_layer(transform: Transform, source: ModelSource, index: int) -> dict[str, torch.Tensor]:
    """What becomes of a layer whose inputs have outliers and will be rounded to 8 bits with the weights."""
    config, random = parse_config(source.config()), torch.Generator().manual_seed(index)
    spec = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), activations="token",
                     scale_dtype="float32")
    stats = {}
    for slot in linear_slots(config):
        if slot.layer == index:
            x = torch.randn(256, slot.in_features, generator=random)
            x[:, ::7] *= 20
            stats[slot.name] = LayerStats(256, x.T @ x / 256, x.abs().amax(dim=0))
    tensors = LayerTensors(source.tensor, source.tensors().__contains__, dict.fromkeys(stats, spec), stats,
                           config.offset_norms)
    assert transform.layer is not None
    transform.layer(config, index, tensors, transform.options())
    return tensors.changed


@torch.no_grad()
def _logits(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weights = Weights(tensors.__getitem__, tensors.__contains__, torch.float32)
    ids = torch.randint(4, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    return CausalLM(parse_config(config), weights)(ids)
