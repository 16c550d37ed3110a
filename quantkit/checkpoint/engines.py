"""Tells from config and layers whether another engine loads a checkpoint, without starting that engine.

:data:`ENGINES` is the table: for each engine and each ``quant_method`` that it reads, the rules in the order
in which they are asked. A rule that only depends on a layer's format, bits, groups and shape is a
:class:`Limit`, a remark is a :class:`Note`; what compares layers with each other is a function. The rules
were read from the sources of the versions in :data:`VERSIONS` by 26 November 2026, and tried where a CPU
could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from quantkit.checkpoint import mlx_models
from quantkit.checkpoint.engine_rules import (
    BYTES,
    EIGHT_BIT,
    FP4,
    MARLIN_GROUPS,
    TRITON_GROUPS,
    Broken,
    CheckpointFacts,
    EngineLayer,
    Limit,
    Note,
    Rule,
    report,
)
from quantkit.checkpoint.integrity import VerifyCheck
from quantkit.checkpoint.manifest import LayerRow
from quantkit.checkpoint.quantization_config import KEYS, LayerScheme, config_words, stored_quantization
from quantkit.models.architecture import EMBEDDING, EXPERT, HEAD, parse_config
from quantkit.plugins.manager import registry
from quantkit.sources.split_experts import FAMILIES as SPLIT_FAMILIES
from quantkit.support.errors import UsageError, did_you_mean

VERSIONS = {"vllm": "0.33 (0.32 on CPUs)", "sglang": "0.5.23", "transformers": "5.23", "mlx": "mlx-lm 0.32"}
DEVICES = ("cuda", "cpu")
DEQUANTIZED = "only with quantization_config=CompressedTensorsConfig(dequantize=True)"
"""How transformers loads what it can't keep quantized."""


def _label(row: LayerRow) -> str:
    return f"{row.spec.label()} by {row.format}" if row.spec else "kept"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def same_scheme(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """q/k/v are one weight in these engines, gate/up and the experts of a layer too."""
    faults = []
    for group in (*subject.fused().values(), *subject.expert_groups().values()):
        other = next((row for row in group if (row.spec, row.format) != (group[0].spec, group[0].format)),
                     None)
        if other is not None:
            first, _, expert = group[0].name.rpartition(".experts.")
            name = f"experts.{expert}" if first else group[0].name.rpartition(".")[2]
            faults.append((other.name, f"is {_label(other)}, {name} is {_label(group[0])}: fused layers must "
                                       "share a scheme"))
    yield from report("fused layers", faults, "q/k/v and gate/up share a scheme")


def rounded_inputs(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Integers a byte each are multiplied by rounded inputs only; weights alone lie packed."""
    for name, group in (subject.quantization.get("config_groups") or {}).items():
        form = group.get("format") or subject.quantization.get("format")
        if form in ("int-quantized", "naive-quantized") and not group.get("input_activations") and (
                (group.get("weights") or {}).get("type", "int") == "int"):
            yield VerifyCheck("layout", "failed", f"{name}: {form} without input_activations has no kernel; "
                                                  "quantkit export DIR --to pack-quantized OUT")


def no_order(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Group activation order was dropped; with one group a row it means nothing."""
    bad = subject.quantization.get("desc_act") is True and subject.quantization.get("group_size") != -1
    yield VerifyCheck("desc_act", "failed" if bad else "ok",
                      "desc_act: true is refused, even where groups are in order" if bad else "false")


def joined_experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Of gpt-oss all engines read the experts of a layer as one tensor, plain or in MXFP4, as the original
    has them."""
    if subject.model.model_type in SPLIT_FAMILIES and subject.method != "mxfp4" and subject.experts:
        yield VerifyCheck("experts", "failed", f"{subject.experts[0].name} is a tensor of its own, and only "
                                               "quantkit reads this family's experts so")


def reason_against_experts(rows: Iterable[LayerScheme]) -> str | None:
    """Why transformers would read experts wrongly, without a word: for all of a model it takes the scheme of
    the first group that mentions them. Shared experts are Linears, and mention them, too."""
    experts = [row for row in rows if row.spec is not None and "experts" in row.name]
    if not any(EXPERT in row.name for row in experts):
        return None
    other = next((row for row in experts if (row.spec, row.format) != (experts[0].spec, experts[0].format)),
                 None)
    return None if other is None else (
        f"{other.name} has another scheme than {experts[0].name}, and transformers reads all experts of a "
        "model by one: it would get other weights")


def one_expert_scheme(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """What :func:`reason_against_experts` says."""
    if subject.experts:
        why = reason_against_experts(subject.rows)
        yield VerifyCheck("experts", "ok" if why is None else "failed", why or "all experts share a scheme")


def zero_points(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """compressed-tensors inside transformers can't make room for packed zero points. Dequantizing at loading
    takes the first group's scheme for all layers: of several it fails, or gives other weights."""
    rows = [layer.row for layer in subject.packed] + ([subject.embedding] if subject.embedding else [])
    schemes = {(row.spec, row.format) for row in rows}
    remedy = f"which load {DEQUANTIZED}" if len(schemes) == 1 else (
        f"and no option loads these beside layers of another scheme ({len(schemes)} here; dequantize=True "
        "fails or gives wrong weights): make it with one scheme for all quantized layers, or with symmetric: "
        "true")
    yield from report("zero points", [(layer.name, f"has zero points, {remedy}") for layer in subject.packed
                                      if not layer.spec.symmetric], "none")


def dequantized_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers initializes every embedding before it reads one, and stumbles over one without weight."""
    if (row := subject.embedding) is not None:
        uniform = all((other.row.spec, other.format) == (row.spec, row.format) for other in subject.packed)
        yield VerifyCheck("embedding", "failed", f"{row.name} is quantized, which " + (
            f"loads {DEQUANTIZED}" if uniform else
            "loads only dequantized, and that only where all layers are of one scheme"))


def vllm_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Rows of packed integers are looked up by a Triton kernel, which the head can't share."""
    if (row := subject.embedding) is None or row.spec is None:
        return
    fault = None
    if subject.tied:
        fault = "is the head too, and only a plain one can be tied; give lm_head a rule of its own"
    elif row.format != "pack-quantized" or not row.spec.symmetric or row.spec.bits not in (2, 4, 8) or (
            row.spec.granularity.strategy == "tensor"):
        fault = (f"is {_label(row)}: symmetric integers of 2, 4 or 8 bits are taken, in groups or with a "
                 "scale a row")
    elif subject.device == "cpu":
        fault = "is quantized: the kernel that looks its rows up is for GPUs"
    yield from report("embedding", [] if fault is None else [(row.name, fault)], "rows are decoded as needed")


def plain_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """SGLang and mlx-lm quantize Linears."""
    if subject.embedding is not None:
        yield VerifyCheck("embedding", "failed",
                          f"{subject.embedding.name} is quantized: it takes plain ones only")


def one_global_scale(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Of q, k and v, and of gate and up, kernels take one global scale for all, whatever the others' are."""
    if not subject.global_scales:
        return
    faults = []
    for group in subject.fused().values():
        known = [(row.name, subject.global_scales[row.name]) for row in group
                 if row.name in subject.global_scales]
        faults += [(name, f"has global scales {scales}, {known[0][0]} has {known[0][1]}: fused layers must "
                          "share them") for name, scales in known if scales != known[0][1]]
    yield from report("global scales", faults, "q/k/v and gate/up share them")


def whole_rows(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Weights are fused with their scales, so that no square may lie across two of them."""
    squares = {layer.name: layer.size for layer in subject.packed if layer.strategy == "tile"}
    if squares:
        yield from report("fused rows", [
            (row.name, f"out_features {row.shape[0]} is no multiple of {squares[row.name]}: a square of the "
                       "fused layer would lie across two")
            for group in subject.fused().values() for row in group[:-1]
            if row.name in squares and row.shape[0] % squares[row.name]], "whole squares")


def sglang_gptq(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """What Marlin doesn't take goes to a kernel with float16 activations."""
    for check in GPTQ(subject):
        if check.status == "failed" and subject.dtype == "float16":
            yield VerifyCheck(check.name, "note", "Marlin doesn't take every layer; a slower kernel with "
                                                  "float16 activations does")
        elif check.status == "failed":
            yield VerifyCheck(check.name, "failed",
                              check.detail + f"; others need float16 activations, not {subject.dtype}")
        else:
            yield check


def _layouts(*known: str) -> Limit:
    """Only these formats are understood."""
    return Limit("layout", ((lambda layer: layer.format not in known,
                             f"format {{layer.format}} is not among {', '.join(known)}"),), ", ".join(known))


def _needs(packages: str) -> Note:
    """What must be installed beside the engine."""
    return Note("packages", f"pip install {packages}")


def _marlin(shapes: str, fits: Broken, device: str | None = None) -> Limit:
    """SGLang's Marlin: 4 bits, and 8 bits symmetric, in its groups and shapes."""
    return Limit("kernel on cuda", (
        (lambda layer: not layer.fits_marlin, "{layer.label}: 4 bits, or 8 bits symmetric, are taken"),
        (lambda layer: layer.size not in MARLIN_GROUPS, NOT_OF_MARLIN),
        (lambda layer: not fits(layer),
         f"[{{layer.out}}, {{layer.columns}}]: Marlin wants multiples of {shapes}")),
        "Marlin takes every weight", "integer_weights", device)


def _integers(broken: Broken) -> Broken:
    """Of layouts without kernels of their own."""
    return lambda layer: layer.is_packed_integers and broken(layer)


def _takes_triton(layer: EngineLayer) -> bool:
    return layer.format == "pack-quantized" and layer.spec.bits == 4


NOT_OF_MARLIN = f"group size {{layer.size}} is not among {_listed(MARLIN_GROUPS)}"
STRATEGY = Limit("strategy", ((lambda layer: layer.format not in BYTES and layer.strategy == "tensor",
                               "one scale a tensor; strategy channel or group is wanted"),),
                 "channel or group")
VLLM_CUDA = Limit("kernel on cuda", (
    (lambda layer: not layer.fits_marlin,
     "{layer.label}: its kernels multiply 4 bits, and 8 bits symmetric (others only with the package "
     "humming)"),
    (lambda layer: _takes_triton(layer) and layer.size not in TRITON_GROUPS,
     f"group size {{layer.size}} is not among {_listed(TRITON_GROUPS)} (-1: a scale a row)"),
    (lambda layer: not _takes_triton(layer) and layer.size not in MARLIN_GROUPS,
     f"{NOT_OF_MARLIN} (-1: a scale a row)"),
    (lambda layer: layer.out % 8, "out_features {layer.out} is not a multiple of 8")),
    "every weight has one", "integer_weights", "cuda")
VLLM_CPU = Limit("kernel on cpu", (
    (lambda layer: layer.format in EIGHT_BIT and not layer.spec.activations,
     "fp8 weights without fp8 activations have no kernel on CPUs"),
    (lambda layer: layer.format in EIGHT_BIT and layer.strategy == "tile" and layer.size != 128,
     "squares of {layer.size}: its CPU kernel takes those of 128"),
    (lambda layer: layer.format in FP4, "its kernels for 4-bit floats are for GPUs"),
    (_integers(lambda layer: layer.spec.bits != 4),
     "{layer.spec.bits} bits: its CPU kernel multiplies 4-bit weights only"),
    (_integers(lambda layer: layer.size % 2 and layer.size != -1), "group size {layer.size} is odd"),
    (_integers(lambda layer: layer.columns % 32), "in_features {layer.columns} is not a multiple of 32"),
    (_integers(lambda layer: layer.out % 32), "out_features {layer.out} is not a multiple of 32")),
    "every weight has one", "weights", "cpu")
VLLM_KERNEL = (
    VLLM_CUDA, VLLM_CPU,
    Note("instruction set", "on x86 its kernel needs AVX-512: the AVX2 build has none", device="cpu",
         where=lambda layer: layer.format not in EIGHT_BIT, unless=VLLM_CPU),
    Note("instruction set", "its kernel for fp8 in squares needs a CPU with AMX, and --dtype bfloat16",
         device="cpu", where=lambda layer: layer.strategy == "tile", unless=VLLM_CPU))
GPTQ = Limit("GPTQ's bits", (
    (lambda layer: layer.spec.bits not in (4, 8) or not layer.spec.symmetric,
     "{layer.label}: GPTQ is taken with 4 or 8 bits, symmetric"),
    (lambda layer: layer.size not in MARLIN_GROUPS, NOT_OF_MARLIN)), "4 or 8, symmetric")
HALF_SCALES = Note("scales", "float16 scales are rounded to the activations' {facts.dtype}; start it with "
                   "--dtype float16 for those of the file", unless_dtype="float16")
AMX = Note("kernel on cpu", "its kernel needs a CPU with AMX", device="cpu")
SGLANG_GPU = Note("kernel on cpu", "SGLang's {facts.method} kernels are for GPUs", "failed", "cpu")
PLAIN_HEAD = Limit("head", ((
    lambda layer: layer.name == HEAD,
    "is quantized, and a plain one is expected there: it would get random weights; keep it"),), "plain")
NO_EXPERTS = Limit("experts", ((
    lambda layer: layer.row.spec, "is an expert by {layer.format}; pack-quantized ones are read"),),
    "none is quantized", "experts", of=bool)
MXFP4_EXPERTS = (
    Limit("experts", ((lambda layer: layer.row.spec is None, "isn't quantized, and MXFP4 is expected"),),
          "all in MXFP4", "experts"),
    Note("dtype", "run it with --dtype bfloat16, not {facts.dtype}", unless_dtype="bfloat16"),
    Note("kernel on cpu", "its kernel for these experts needs a CPU with AMX", device="cpu"))
WHOLE_INPUTS = Limit("inputs", ((
    lambda layer: layer.columns % layer.size,
    "in_features {layer.columns} is no multiple of the {layer.size} inputs that share a scale"),),
    "whole groups", of=lambda layer: layer.strategy == "tile" and layer.spec.activations)
WHOLE_SQUARES = Limit("squares", ((
    lambda layer: layer.strategy == "tile" and any(side % layer.size for side in layer.row.shape
                                                   if side > layer.size),
    "[{layer.out}, {layer.columns}] isn't whole squares of {layer.size}, and transformers takes all layers' "
    "squares to be whole"),), "whole ones")
SGLANG_FLOATS = Limit("kernel for floats", (
    (lambda layer: layer.format == "mxfp4-pack-quantized" and ".experts." not in layer.name,
     "MXFP4 is multiplied in experts only: quantize to nvfp4"),
    (lambda layer: layer.strategy == "tile" and not layer.spec.activations,
     "fp8 in squares needs activations: group"),
    (lambda layer: layer.strategy == "tile" and layer.name == HEAD,
     "the head can't be in squares: use strategy channel")), None)
FLOATS = (one_global_scale, WHOLE_INPUTS, whole_rows)
COMPRESSED = _layouts("pack-quantized", *BYTES, *FP4)
ENGINES: dict[str, dict[str, tuple[Rule, ...]]] = {
    "vllm": {
        "compressed-tensors": (COMPRESSED, rounded_inputs, STRATEGY, same_scheme, *VLLM_KERNEL, Note(
            "dtype", "run it with --dtype bfloat16: in float16 vLLM crashes on CPUs with AMX (scale_C: "
            "scalar path not implemented)", device="cpu",
            where=lambda layer: layer.format == "int-quantized" and layer.spec.activations), vllm_embedding,
            *FLOATS),
        "fp8": (same_scheme, *VLLM_KERNEL, WHOLE_INPUTS),
        "gptq": (no_order, GPTQ, same_scheme, *VLLM_KERNEL, HALF_SCALES),
        "awq": (same_scheme, *VLLM_KERNEL, HALF_SCALES),
        "mxfp4": MXFP4_EXPERTS},
    "sglang": {
        "compressed-tensors": (COMPRESSED, rounded_inputs, SGLANG_GPU, STRATEGY, same_scheme, _marlin(
            "[64, 128] or [128, 64]", lambda layer: not (layer.out % 64 or layer.columns % 128)
            or not (layer.out % 128 or layer.columns % 64)), plain_embedding, SGLANG_FLOATS, *FLOATS),
        "fp8": (AMX, same_scheme, SGLANG_FLOATS, *FLOATS),
        "gptq": (SGLANG_GPU, sglang_gptq, same_scheme, HALF_SCALES),
        "awq": (same_scheme, AMX, _marlin(  # what SGLang checks itself, which is less than there is
            "[64, 128]", lambda layer: not (layer.out % 64 or layer.columns % 128), "cuda"), HALF_SCALES),
        "bitsandbytes": (SGLANG_GPU, same_scheme, _needs("bitsandbytes")),
        "mxfp4": (SGLANG_GPU, *MXFP4_EXPERTS)},
    "transformers": {
        "compressed-tensors": (COMPRESSED, zero_points, one_expert_scheme, WHOLE_INPUTS,
                               dequantized_embedding, _needs("compressed-tensors accelerate")),
        "fp8": (WHOLE_SQUARES, _needs("accelerate")),
        "gptq": (Limit("kept layers", ((
            lambda layer: layer.row.spec is None and layer.name != HEAD,
            "is kept, and optimum expects every Linear of a block quantized: it would get random weights"),),
            "every Linear of a block is quantized", "linears"),
            PLAIN_HEAD, NO_EXPERTS, _needs("optimum gptqmodel")),
        "awq": (PLAIN_HEAD, NO_EXPERTS, _needs("gptqmodel accelerate")),
        "bitsandbytes": (NO_EXPERTS, _needs("bitsandbytes accelerate")),
        "mxfp4": (Note("experts", "without the package kernels, or without a GPU, transformers loads them "
                       "dequantized to bfloat16"), _needs("accelerate"))},
    "mlx": {
        "mlx": (*mlx_models.RULES, _needs("mlx-lm")),
        "mxfp4": (*mlx_models.RULES, _needs("mlx-lm")),
        "awq": (*mlx_models.RULES, mlx_models.awq_groups, plain_embedding, _needs("mlx-lm"))}}
"""By engine and ``quant_method``, the rules that are asked, in order."""
BLOCKS = {"sglang": ("sdar",)}
"""Families that write blocks, by the engines that run them so."""
MIXED = ": no standard says this mix"
EXTRA = {("vllm", "bitsandbytes"): ": vLLM 0.33 left it to a plugin; export it, or quantize to int4",
         **{(engine, "quantkit"): MIXED for engine in ENGINES}}


class DescribedCheckpoint(Protocol):
    """A checkpoint, ours or another tool's."""

    @property
    def layers(self) -> Sequence[LayerRow]: ...

    def config(self) -> dict[str, Any]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


def check_engine(engine: str, checkpoint: DescribedCheckpoint,
                 device: str = "cuda") -> tuple[VerifyCheck, ...]:
    """What an engine would say of a checkpoint: ``failed`` means that it refuses to load it.

    Args:
        engine: ``vllm``, ``sglang``, ``transformers`` or ``mlx``.
        checkpoint: the checkpoint, opened.
        device: ``cuda`` or ``cpu``, where the engine would run.

    Raises:
        UsageError: no such engine or device.
    """
    for kind, name, known in (("engine", engine, ENGINES), ("device", device, DEVICES)):
        if name not in known:
            raise UsageError(f"no {kind} is called {name!r}", why=did_you_mean(name, known))
    scales = {row.name: tuple(float(checkpoint.tensor(f"{row.name}.{suffix}"))
                              for suffix in ("weight_global_scale", "input_global_scale")
                              [:1 + row.spec.static_inputs])
              for row in checkpoint.layers if row.spec and row.format == "nvfp4-pack-quantized"}
    return check_layers(engine, checkpoint.config(), checkpoint.layers, device, scales)


def check_layers(engine: str, config: Mapping[str, Any], layers: Sequence[LayerRow], device: str = "cuda",
                 global_scales: Mapping[str, tuple[float, ...]] | None = None) -> tuple[VerifyCheck, ...]:
    """The same, told from ``config.json`` and the rows of a manifest, and from layers' global scales if they
    are known."""
    quantization = stored_quantization(config) or {}
    shape = parse_config(config)
    rows = tuple(row for row in layers if row.name != EMBEDDING)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    embedding = next((row for row in layers if row.name == EMBEDDING and row.spec), None)
    subject = CheckpointFacts(quantization.get("quant_method"), quantization, rows, embedding, device, dtype,
                              config, shape, global_scales or {})
    if shape.diffusion is not None and shape.model_type not in BLOCKS.get(engine, ()):
        return (VerifyCheck("model", "failed", f"{engine} writes no blocks of tokens, as {shape.model_type} "
                                               "models do"),)
    if subject.method is None:
        return (VerifyCheck("quant_method", "ok", "nothing is quantized"),)
    readers = ENGINES[engine]
    if subject.method not in readers:
        return (VerifyCheck("quant_method", "failed",
                            f"{engine} reads {', '.join(readers)}, not {subject.method}"
                            + (EXTRA.get((engine, subject.method)) or _remedy(engine, subject))),)
    checks = [VerifyCheck("quant_method", "ok", subject.method)]
    for rule in (joined_experts, *readers[subject.method]):
        checks += rule(subject)
    return tuple(checks)


def reason_against(engine: str, config: Mapping[str, Any], layers: Sequence[LayerRow]) -> str | None:
    """Why an engine wouldn't load layers on a GPU that are still to be written; ``None`` if it would.

    Args:
        engine: as for :func:`check_engine`.
        config: the model's ``config.json``; what it says of quantization isn't used.
        layers: the rows of the manifest that is to be.
    """
    plain = {key: value for key, value in config.items() if key not in KEYS}
    checks = check_layers(engine, {**plain, **config_words(layers)}, layers)
    return next((f"{check.name}: {check.detail}" for check in checks if check.status == "failed"), None)


def sort_engines(check: Callable[[str], Sequence[VerifyCheck]]) -> tuple[list[str], list[str]]:
    """The engines that load a checkpoint, and those that refuse it.

    Args:
        check: returns what an engine would say of it.
    """
    refuse = [engine for engine in ENGINES if any(answer.status == "failed" for answer in check(engine))]
    return [engine for engine in ENGINES if engine not in refuse], refuse


def _remedy(engine: str, subject: CheckpointFacts) -> str:
    """The export that makes an engine's own layout of these layers without rounding, if there is one."""
    form = registry("formats").get("mlx")
    exact = engine == "mlx" and all(
        layer.spec.scale_dtype in ("model", layer.row.dtype)
        and form.reason_against(layer.spec, layer.row.shape) is None for layer in subject.packed)
    return "; quantkit export DIR --to mlx OUT" if exact else ""
