"""Writes the manifest's rows as ``quantization_config``, in the standard that can express them.

Read by transformers and vLLM; the keys are exactly those that compressed-tensors
(https://github.com/vllm-project/compressed-tensors) and bitsandbytes
(https://github.com/bitsandbytes-foundation/bitsandbytes) know, since unknown ones are errors there, and those
of GPTQModel (https://github.com/ModelCloud/GPTQModel), AutoAWQ (https://github.com/casper-hansen/AutoAWQ) and
DeepSeek (https://huggingface.co/docs/transformers/quantization/finegrained_fp8).
mlx-lm (https://github.com/ml-explore/mlx-lm) reads a key of its own, ``quantization``, writes the same table
as ``quantization_config``, and has no ``quant_method`` in it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from quantkit import __version__
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.outline import TOWER

_TYPES = {"int": "int", "fp": "float"}
OWN: dict[str, Any] = {"quant_method": "quantkit"}
"""What is written when no standard can say it: ``quantkit.json`` does, and only quantkit reads it."""
_EXPERT = re.compile(r"(.*)\.experts\.\d+\.")
_SHARED = re.compile(r"(.+\.shared_expert)\.[^.]+")
_FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
"""What engines make one weight of, and their name for it."""
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Its names for an expert's layers, and those by which engines ask for the scheme of any."""
COMPRESSED = {"pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized",
              "mxfp4-pack-quantized"}
"""Layouts of compressed-tensors."""
NF4 = "bnb-nf4"
MLX = "mlx"
"""The ``quant_method`` by which we call what has none in the file."""
KEYS = ("quantization", "quantization_config")
"""Of ``config.json``: mlx-lm's, and everybody's."""
NO_TOWER = rf"(?!.*(?:{TOWER}))"
"""At the beginning of a pattern for layers of a language model: a tower beside it may have modules of the
same names."""
_ELSEWHERE = {"conv": "(?:short_)?conv", "mamba": "(?:mamba|mixer)"}
"""Parts of layers that vLLM calls otherwise (LFM2's, Granite's), and what is either: it compares patterns
with its own names."""
SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
"""Its names for the dtypes of groups' scales."""


class LayerScheme(Protocol):
    """What is needed of a layer: a row of a plan or of a manifest."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str | None: ...
    @property
    def spec(self) -> QuantSpec | None: ...
    @property
    def dtype(self) -> str: ...


def quantization_config(rows: Sequence[LayerScheme], version: str = __version__,
                        layer_prefix: str | None = None) -> dict[str, Any] | None:
    """The value for ``config.json``; ``None`` if no layer is quantized.

    Args:
        rows: every Linear of the model, kept ones too, and the embedding if it is quantized. ``lm_head`` may
            be missing (tied embeddings).
        version: the version of the quantkit that wrote them; GPTQ's standard has a place for it.
        layer_prefix: of a model whose family isn't known, the beginning of its layers' names: no class of
            modules is meant then, since nobody knows what else of that class it has.
    """
    packed = [row for row in rows if row.spec is not None]
    if not packed:
        return None
    formats = {row.format for row in packed}
    if layer_prefix is not None and not all(row.name.startswith(layer_prefix) for row in packed):
        return dict(OWN)  # no standard says which of several modules of a name is meant
    if layer_prefix is not None and formats == {NF4} and len({_bnb_key(row) for row in packed}) == 1:
        patterns = [pattern.removeprefix("re:") for pattern in _patterns(
            (row.name for row in packed), layer_prefix)]
        return _bitsandbytes(packed[0], [f"(?!{'|'.join(patterns)}).+"])  # all but these stay
    if layer_prefix is not None and not formats <= COMPRESSED:
        return dict(OWN)
    kept = [row.name for row in rows if row.spec is None]
    # the routers of experts are never quantized; other engines have Linears there too
    kept += dict.fromkeys(f"{match[1]}.gate" for row in rows if (match := _EXPERT.match(row.name)))
    gates = dict.fromkeys(f"{match[1]}_gate" for row in rows if (match := _SHARED.match(row.name)))
    kept += [name for name in gates if name not in kept]
    tied = all(row.name != HEAD for row in rows)
    if tied:
        kept.append(HEAD)  # with tied embeddings other engines still have a Linear of that name
    if any(row.spec.rotation for row in packed if row.spec):
        return dict(OWN)  # another engine would not rotate the inputs
    if formats == {MLX} and all(_model_scales(row) for row in packed):
        return _mlx(packed)
    if any(row.name == EMBEDDING for row in packed) and not _says_embeddings(packed, tied):
        return dict(OWN)
    if formats <= COMPRESSED and all(_model_scales(row) for row in packed):
        return _compressed_tensors(packed, kept, layer_prefix)
    if formats == {NF4} and len({_bnb_key(row) for row in packed}) == 1:
        return _bitsandbytes(packed[0], kept)
    if len(formats) == 1 and len({(row.spec, row.dtype) for row in packed}) == 1:
        if formats == {"bnb-int8"}:
            return _bitsandbytes(packed[0], kept)
        if formats <= {"gptq", "gptq-v2"}:
            return _gptq(packed, kept, version)
        if formats == {"awq"}:
            return _awq(packed, kept)
        if formats == {"fine-grained-fp8"}:
            return _fine_grained(packed[0], kept)
    return dict(OWN)


def config_words(rows: Sequence[LayerScheme], version: str = __version__,
                 layer_prefix: str | None = None) -> dict[str, Any]:
    """What ``config.json`` says of quantization, by key; the arguments are :func:`quantization_config`'s."""
    quantization = quantization_config(rows, version, layer_prefix)
    if quantization is None:
        return {}
    return dict.fromkeys(KEYS[0 if "quant_method" not in quantization else 1:], quantization)


def stored_quantization(config: Mapping[str, Any]) -> Any:
    """What a ``config.json`` says of quantization, whatever key it has for that. mlx-lm's table gets a
    ``quant_method``, and ``layers`` for what stands there beside names; any other one is as it is. ``None``
    if there is nothing."""
    for value in map(config.get, KEYS):
        if isinstance(value, dict) and {"bits", "group_size"} <= value.keys() and "quant_method" not in value:
            named = {key: entry for key, entry in value.items() if isinstance(entry, dict | bool)}
            rest = {key: entry for key, entry in value.items() if key not in named}
            return {"quant_method": MLX, **rest, "layers": named}
    return next((config[key] for key in reversed(KEYS) if config.get(key) is not None), None)


def _says_embeddings(packed: Sequence[LayerScheme], tied: bool) -> bool:
    """Of the standards only compressed-tensors knows quantized embeddings. One that is the head too is read
    only by who dequantizes all of the file by one scheme."""
    schemes = {(row.spec, row.format, row.dtype) for row in packed}
    return {row.format for row in packed} <= COMPRESSED and not (tied and len(schemes) > 1)


def _model_scales(row: LayerScheme) -> bool:
    return row.spec is not None and row.spec.scale_dtype in ("model", row.dtype, *SCALE_DTYPES)


def _weights(spec: QuantSpec) -> dict[str, Any]:
    return {"num_bits": spec.bits, "type": _TYPES[spec.kind], "symmetric": spec.symmetric,
            **(_groups(spec) if spec.granularity.strategy == "group" else _strategy(spec)), "dynamic": False}


def _strategy(spec: QuantSpec) -> dict[str, Any]:
    if spec.granularity.strategy == "tile":
        return {"strategy": "block", "block_structure": [spec.granularity.size] * 2}
    return {"strategy": spec.granularity.strategy}


def _groups(spec: QuantSpec) -> dict[str, Any]:
    """Of weights, and of activations that are rounded in the same groups."""
    strategy = "tensor_group" if spec.scale_dtype == "e4m3" else "group"
    stored = SCALE_DTYPES.get(spec.scale_dtype)
    return {"strategy": strategy, "group_size": spec.granularity.size,
            **({} if stored is None else {"scale_dtype": stored})}


def _inputs(spec: QuantSpec) -> dict[str, Any] | None:
    if spec.activations is None:
        return None
    scales = _groups(spec) if spec.activations == "group" else {"strategy": spec.activations}
    return {"num_bits": spec.bits, "type": _TYPES[spec.kind], "symmetric": True, **scales,
            "dynamic": "local" if spec.static_inputs else True}


def _format(row: LayerScheme) -> str:
    """The layout's name in compressed-tensors, where float weights alone are called something else."""
    assert row.spec is not None and row.format is not None
    plain = row.format == "float-quantized" and not row.spec.activations
    return "naive-quantized" if plain else row.format


def _compressed_tensors(packed: Sequence[LayerScheme], kept: list[str],
                        layer_prefix: str | None) -> dict[str, Any]:
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for row in packed:
        assert row.spec is not None
        scheme = {"format": _format(row), "weights": _weights(row.spec),
                  "input_activations": _inputs(row.spec), "output_activations": None}
        groups.setdefault(str(scheme), (scheme, []))[1].append(row.name)
    single = sum(names != [EMBEDDING] for _, names in groups.values()) == 1

    def targets(names: list[str]) -> list[str]:
        """Targets by class or name: vLLM's head isn't a Linear, and its embedding has no name."""
        if layer_prefix is not None:
            return _patterns(names, layer_prefix)
        linears = [name for name in names if name != EMBEDDING]
        named = [f"re:^{_pattern(name)}$" for name in linears if not single or name == HEAD]
        return ["Linear"] * (single and bool(linears)) + named + ["Embedding"] * (EMBEDDING in names)

    layouts = {scheme["format"] for scheme, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed", "version": "0.20.0", "global_compression_ratio": None,
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "ignore": kept,
        "config_groups": {
            f"group_{index}": {"targets": targets(names), **scheme}
            for index, (scheme, names) in enumerate(groups.values())}}


def _patterns(names: Iterable[str], prefix: str) -> list[str]:
    """Layers of the language model by what is behind ``prefix``: engines have another path before it. One
    pattern a module, with the numbers of its layers."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        number, _, module = name.removeprefix(prefix).partition(".")
        layers[module].append(number)
    last = re.escape(prefix.rstrip(".").rpartition(".")[2])
    return [f"re:{NO_TOWER}.*{last}\\.(?:{'|'.join(numbers)})\\.{_either(module)}$"
            for module, numbers in layers.items()]


def _either(module: str) -> str:
    """A module's path in its layer, also by what vLLM calls its first part."""
    part, dot, rest = module.partition(".")
    return _ELSEWHERE.get(part, re.escape(part)) + re.escape(dot + rest) if dot else re.escape(module)


def _pattern(name: str) -> str:
    place, _, last = name.rpartition(".")
    if _EXPERT.match(name) and last in _MIXTRAL:
        return f"{re.escape(place)}\\.({last}|{_MIXTRAL[last]})"
    return re.escape(name)


def _with_fused(kept: Sequence[str]) -> list[str]:
    """Names of kept layers, and of what engines fuse them into: some look for that name only."""
    names, result = set(kept), list(kept)
    for parts, fused in _FUSED.items():
        for name in kept:
            place, _, last = name.rpartition(".")
            if last == parts[0] and all(f"{place}.{part}" in names for part in parts):
                result.append(f"{place}.{fused}")
    return result


def _bnb_key(row: LayerScheme) -> tuple[Any, ...]:
    assert row.spec is not None
    return (row.spec.nested, row.spec.granularity.size, row.dtype)


def _bitsandbytes(row: LayerScheme, kept: list[str]) -> dict[str, Any]:
    assert row.spec is not None
    four = row.spec.kind == "nf"
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four,
        "_load_in_4bit": four, "_load_in_8bit": not four, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": row.spec.nested, "bnb_4bit_compute_dtype": row.dtype,
        "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": _with_fused(kept), "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False}


def _gptq(packed: Sequence[LayerScheme], kept: list[str], version: str) -> dict[str, Any]:
    spec = packed[0].spec
    assert spec is not None
    form = str(packed[0].format).replace("-", "_")
    inside = [name for name in _with_fused(kept) if name != HEAD]
    return {
        "quant_method": "gptq", "method": "gptq", "format": form, "checkpoint_format": form,
        "bits": spec.bits, "group_size": spec.granularity.size or -1, "sym": spec.symmetric,
        "desc_act": False, "lm_head": _has_head(packed), "pack_dtype": "int32",
        **({"dynamic": {f"-:^{re.escape(name)}$": {} for name in inside}} if inside else {}),
        "meta": {"quantizer": [f"quantkit:{version}"]}}


def _awq(packed: Sequence[LayerScheme], kept: list[str]) -> dict[str, Any]:
    spec = packed[0].spec
    assert spec is not None
    head = {"lm_head": True} if _has_head(packed) else {}  # AutoAWQ knows no such key
    return {"quant_method": "awq", "bits": 4, "group_size": spec.granularity.size or -1,
            "zero_point": True, "version": "gemm", "modules_to_not_convert": _with_fused(kept), **head}


def _mlx(packed: Sequence[LayerScheme]) -> dict[str, Any]:
    """The commonest scheme for all, and entries by name for those of others. What is kept isn't named: a
    layer without ``scales`` in the file is plain."""
    schemes = {row.name: {"group_size": row.spec.granularity.size, "bits": row.spec.bits, "mode": "affine"}
               for row in packed if row.spec}
    common = Counter(str(scheme) for scheme in schemes.values()).most_common(1)[0][0]
    default = next(scheme for scheme in schemes.values() if str(scheme) == common)
    return default | {name: scheme for name, scheme in schemes.items() if scheme != default}


def _fine_grained(row: LayerScheme, kept: list[str]) -> dict[str, Any]:
    assert row.spec is not None
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [row.spec.granularity.size] * 2, "modules_to_not_convert": _with_fused(kept)}


def _has_head(packed: Sequence[LayerScheme]) -> bool:
    return any(row.name == HEAD for row in packed)
