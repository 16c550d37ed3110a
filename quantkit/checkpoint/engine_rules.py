"""The loading rules of other engines: each rule is a function from a checkpoint to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.checks import VerifyCheck
from quantkit.checkpoint.manifest import LayerRow
from quantkit.models.architecture import HEAD
from quantkit.models.config import ModelConfig
from quantkit.sources import split_experts

MARLIN_GROUPS = (-1, 32, 64, 128)
TRITON_GROUPS = (*MARLIN_GROUPS, 256)
BYTES = ("int-quantized", "float-quantized")
"""Layouts of a byte a weight, which have kernels of their own."""
EIGHT_BIT = (*BYTES, "fine-grained-fp8")
"""Those, and DeepSeek's."""
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Layouts of 4-bit floats, which have theirs too."""
SPLIT_FAMILIES = split_experts.FAMILIES
"""Whose experts are one tensor a layer in everybody's files but ours."""
DEQUANTIZED = "only with quantization_config=CompressedTensorsConfig(dequantize=True)"
"""How transformers loads what it can't keep quantized."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What rules look at.

    Attributes:
        method: ``quant_method``; ``None`` if nothing is quantized.
        quantization: ``quantization_config``.
        rows: every Linear.
        packed: those that are quantized.
        embedding: if it is quantized.
        tied: whether it is the head too.
        shares: name → layers of equal value see the same input.
        device: ``cuda`` or ``cpu``.
        dtype: of the model.
        config: ``config.json``.
        model: what it says of the model.
        global_scales: name → the numbers beside a layer's e4m3 scales, where tensors could be read.
    """

    method: str | None
    quantization: Mapping[str, Any]
    rows: tuple[LayerRow, ...]
    packed: tuple[LayerRow, ...]
    embedding: LayerRow | None
    tied: bool
    shares: Mapping[str, str]
    device: str
    dtype: str
    config: Mapping[str, Any]
    model: ModelConfig
    global_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def fused(self) -> dict[str, list[LayerRow]]:
        """q, k and v, and gate and up, as engines fuse them: into one weight."""
        groups: dict[str, list[LayerRow]] = defaultdict(list)
        for row in self.rows:
            shares = self.shares[row.name]
            if shares.endswith((".qkv", ".gate_up")):
                groups[shares].append(row)
        return groups

    def experts(self) -> dict[str, list[LayerRow]]:
        """The experts of each layer, which engines keep in one weight or two."""
        groups: dict[str, list[LayerRow]] = defaultdict(list)
        for row in self.rows:
            place, expert, _ = row.name.partition(".experts.")
            if expert:
                groups[place].append(row)
        return groups

    def weights(self) -> dict[str, tuple[LayerRow, int]]:
        """What an engine multiplies by: name → a quantized layer of it, and the rows of all fused in it."""
        modules: dict[str, tuple[LayerRow, int]] = {}
        groups = self.fused()
        for row in self.packed:
            together = groups.get(self.shares[row.name], [row])
            name = self.shares[row.name] if len(together) > 1 else row.name
            modules.setdefault(name, (row, sum(part.shape[0] for part in together)))
        return modules


Rule = Callable[[CheckpointFacts], Iterator[VerifyCheck]]


def _size(row: LayerRow) -> int:
    assert row.spec is not None
    return row.spec.granularity.size or -1


def _label(row: LayerRow) -> str:
    return f"{row.spec.label()} by {row.format}" if row.spec else "kept"


def told(name: str, faults: Sequence[tuple[str, str]], fine: str) -> Iterator[VerifyCheck]:
    """One line a rule: the first layer that breaks it, and how many do."""
    if not faults:
        yield VerifyCheck(name, "ok", fine)
        return
    layer, why = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    yield VerifyCheck(name, "failed", f"{layer}: {why}{more}")


def layouts(*known: str) -> Rule:
    """Only these formats are understood."""
    def rule(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
        yield from told("layout", [(row.name, f"format {row.format} is not among {', '.join(known)}")
                                    for row in subject.packed if row.format not in known], ", ".join(known))
    return rule


def same_scheme(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """q/k/v are one weight in these engines, gate/up and the experts of a layer too."""
    faults = []
    for group in (*subject.fused().values(), *subject.experts().values()):
        other = next((row for row in group if (row.spec, row.format) != (group[0].spec, group[0].format)),
                     None)
        if other is not None:
            first, _, expert = group[0].name.rpartition(".experts.")
            name = f"experts.{expert}" if first else group[0].name.rpartition(".")[2]
            faults.append((other.name, f"is {_label(other)}, {name} is {_label(group[0])}: fused layers must "
                                       "share a scheme"))
    yield from told("fused layers", faults, "q/k/v and gate/up share a scheme")


def rounded_inputs(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Integers a byte each are multiplied by rounded inputs only; weights alone lie packed."""
    format_of_model = subject.quantization.get("format")
    for name, group in (subject.quantization.get("config_groups") or {}).items():
        form = group.get("format") or format_of_model
        if form in ("int-quantized", "naive-quantized") and not group.get("input_activations") and (
                (group.get("weights") or {}).get("type", "int") == "int"):
            yield VerifyCheck("layout", "failed", f"{name}: {form} without input_activations has no kernel; "
                                                  "quantkit export DIR --to pack-quantized OUT")


def grouped_or_channel(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """One scale a tensor has no kernel."""
    yield from told("strategy", [(row.name, "one scale a tensor; strategy channel or group is wanted")
                                  for row in subject.packed if row.format not in BYTES
                                  and row.spec and row.spec.granularity.strategy == "tensor"],
                     "channel or group")


def vllm_kernel(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Which of vLLM's kernels takes each weight on this device."""
    refuses = _vllm_cpu if subject.device == "cpu" else _vllm_cuda
    faults = [(name, reason) for name, (row, out) in subject.weights().items()
              if (reason := refuses(row, out)) is not None]
    yield from told(f"kernel on {subject.device}", faults, "every weight has one")
    if subject.device != "cpu" or faults:
        return
    if any(row.format not in EIGHT_BIT for row in subject.packed):
        yield VerifyCheck("instruction set", "note",
                          "on x86 its kernel needs AVX-512: the AVX2 build has none")
    if any(row.spec and row.spec.granularity.strategy == "tile" for row in subject.packed):
        yield VerifyCheck("instruction set", "note",
                          "its kernel for fp8 in squares needs a CPU with AMX, and --dtype bfloat16")


def _vllm_cuda(row: LayerRow, out: int) -> str | None:
    assert row.spec is not None
    if row.format in (*EIGHT_BIT, *FP4):
        return None
    bits, symmetric, size = row.spec.bits, row.spec.symmetric, _size(row)
    if (bits, symmetric) not in ((4, True), (4, False), (8, True)):
        return (f"{row.spec.label()}: its kernels multiply 4 bits, and 8 bits symmetric (others only with "
                "the package humming)")
    allowed = TRITON_GROUPS if bits == 4 and row.format == "pack-quantized" else MARLIN_GROUPS
    if size not in allowed:
        return f"group size {size} is not among {', '.join(map(str, allowed))} (-1: a scale a row)"
    return f"out_features {out} is not a multiple of 8" if out % 8 else None


def _vllm_cpu(row: LayerRow, out: int) -> str | None:
    assert row.spec is not None
    if row.format in EIGHT_BIT:
        if not row.spec.activations:
            return "fp8 weights without fp8 activations have no kernel on CPUs"
        if row.spec.granularity.strategy == "tile" and row.spec.granularity.size != 128:
            return f"squares of {row.spec.granularity.size}: its CPU kernel takes those of 128"
        return None
    if row.format in FP4:
        return "its kernels for 4-bit floats are for GPUs"
    if row.spec.bits != 4:
        return f"{row.spec.bits} bits: its CPU kernel multiplies 4-bit weights only"
    if (size := _size(row)) != -1 and size % 2:
        return f"group size {size} is odd"
    for side, features in (("in", row.shape[1]), ("out", out)):
        if features % 32:
            return f"{side}_features {features} is not a multiple of 32"
    return None


def gptq_types(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """vLLM and SGLang's fast path take symmetric 4 and 8 bits in Marlin's groups."""
    faults = []
    for row in subject.packed:
        assert row.spec is not None
        if row.spec.bits not in (4, 8) or not row.spec.symmetric:
            faults.append((row.name, f"{row.spec.label()}: GPTQ is taken with 4 or 8 bits, symmetric"))
        elif _size(row) not in MARLIN_GROUPS:
            faults.append((row.name,
                           f"group size {_size(row)} is not among {', '.join(map(str, MARLIN_GROUPS))}"))
    yield from told("GPTQ's bits", faults, "4 or 8, symmetric")


def no_order(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Group activation order was dropped; with one group a row it means nothing."""
    bad = subject.quantization.get("desc_act") is True and subject.quantization.get("group_size") != -1
    yield VerifyCheck("desc_act", "failed" if bad else "ok",
                      "desc_act: true is refused, even where groups are in order" if bad else "false")


def half_scales(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """A note where float16 scales are rounded to the activations' dtype: the model differs slightly."""
    if subject.dtype != "float16":
        yield VerifyCheck("scales", "note",
                          f"float16 scales are rounded to the activations' {subject.dtype}; "
                          "start it with --dtype float16 for those of the file")


def gptq_kept(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """optimum makes every Linear of a block a quantized one."""
    yield from told("kept layers", [
        (row.name,
         "is kept, and optimum expects every Linear of a block quantized: it would get random weights")
        for row in subject.rows if row.spec is None and row.name != "lm_head"],
                     "every Linear of a block is quantized")


def plain_head(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers leaves the output layer a plain one in these layouts, whatever the file holds."""
    yield from told("head", [
        (row.name, "is quantized, and a plain one is expected there: it would get random weights; keep it")
        for row in subject.packed if row.name == HEAD], "plain")


def no_experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers 5 has one tensor for all experts of a layer, and makes it from plain and pack-quantized
    ones."""
    if experts := subject.experts():
        yield from told("experts", [(row.name, f"is an expert by {row.format}; pack-quantized ones are read")
                                     for rows in experts.values() for row in rows if row.spec],
                         "none is quantized")


def joined_experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Of gpt-oss all engines read the experts of a layer as one tensor, plain or in MXFP4, as the original
    has them."""
    if subject.model.model_type in SPLIT_FAMILIES and subject.method != "mxfp4":
        layer = next((row for row in subject.rows if ".experts." in row.name), None)
        if layer is not None:
            yield VerifyCheck("experts", "failed", f"{layer.name} is a tensor of its own, and only "
                                                   "quantkit reads this family's experts so")


def bfloat16_experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """These engines take every layer's experts to be MXFP4, whatever ``modules_to_not_convert`` says, and
    multiply them with bfloat16."""
    yield from told("experts", [(row.name, "isn't quantized, and MXFP4 is expected") for row in subject.rows
                                if ".experts." in row.name and row.spec is None], "all in MXFP4")
    if subject.dtype != "bfloat16":
        yield VerifyCheck("dtype", "note", f"run it with --dtype bfloat16, not {subject.dtype}")
    if subject.device == "cpu":
        yield VerifyCheck("kernel on cpu", "note", "its kernel for these experts needs a CPU with AMX")


def dequantized_experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers multiplies MXFP4 by kernels from the hub."""
    yield VerifyCheck("experts", "note", "without the package kernels, or without a GPU, transformers loads "
                                         "them dequantized to bfloat16")


def zero_points(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """compressed-tensors inside transformers can't make room for packed zero points. Dequantizing at loading
    takes the first group's scheme for all layers: of several it fails, or gives other weights."""
    schemes = {(row.spec, row.format) for row in (*subject.packed, subject.embedding) if row is not None}
    remedy = f"which load {DEQUANTIZED}" if len(schemes) == 1 else (
        f"and no option loads these beside layers of another scheme ({len(schemes)} here; dequantize=True "
        "fails or gives wrong weights): make it with one scheme for all quantized layers, or with symmetric: "
        "true")
    faults = [(row.name, f"has zero points, {remedy}")
              for row in subject.packed if row.spec and not row.spec.symmetric]
    yield from told("zero points", faults, "none")


def vllm_rounded_inputs(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Its int8 kernel for Intel's AMX has no float16."""
    rounded = any(row.format == "int-quantized" and row.spec and row.spec.activations
                  for row in subject.packed)
    if subject.device == "cpu" and rounded:
        yield VerifyCheck("dtype", "note",
                          "run it with --dtype bfloat16: in float16 vLLM crashes on CPUs with AMX "
                          "(scale_C: scalar path not implemented)")


def dequantized_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """transformers initializes every embedding before it reads one, and stumbles over one without weight."""
    if (row := subject.embedding) is None:
        return
    uniform = all((other.spec, other.format) == (row.spec, row.format) for other in subject.packed)
    yield VerifyCheck("embedding", "failed", f"{row.name} is quantized, which " + (
        f"loads {DEQUANTIZED}" if uniform else
        "loads only dequantized, and that only where all layers are of one scheme"))


def vllm_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Rows of packed integers are looked up by a Triton kernel, which the head can't share."""
    if (row := subject.embedding) is None:
        return
    assert row.spec is not None
    fault = None
    if subject.tied:
        fault = "is the head too, and only a plain one can be tied; give lm_head a rule of its own"
    elif row.format != "pack-quantized" or not row.spec.symmetric or row.spec.bits not in (2, 4, 8) or (
            row.spec.granularity.strategy == "tensor"):
        fault = (f"is {_label(row)}: symmetric integers of 2, 4 or 8 bits are taken, in groups or with a "
                 "scale a row")
    elif subject.device == "cpu":
        fault = "is quantized: the kernel that looks its rows up is for GPUs"
    yield from told("embedding", [] if fault is None else [(row.name, fault)], "rows are decoded as needed")


def plain_embedding(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """SGLang quantizes Linears."""
    if subject.embedding is not None:
        yield VerifyCheck("embedding", "failed",
                          f"{subject.embedding.name} is quantized: it takes plain ones only")


def needs(packages: str) -> Rule:
    """What must be installed beside the engine."""
    def rule(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
        yield VerifyCheck("packages", "note", f"pip install {packages}")
    return rule


def sglang_gpu(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """SGLang's weight-only kernels but AWQ's are for GPUs."""
    if subject.device == "cpu":
        yield VerifyCheck("kernel on cpu", "failed", f"SGLang's {subject.method} kernels are for GPUs")


def sglang_wna16(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Marlin: 4 bits, and 8 bits symmetric, in its groups and shapes."""
    faults = []
    for name, (row, out) in subject.weights().items():
        assert row.spec is not None
        if row.format in (*BYTES, *FP4):
            continue
        if (row.spec.bits, row.spec.symmetric) not in ((4, True), (4, False), (8, True)):
            faults.append((name, f"{row.spec.label()}: 4 bits, or 8 bits symmetric, are taken"))
        elif _size(row) not in MARLIN_GROUPS:
            faults.append((name,
                           f"group size {_size(row)} is not among {', '.join(map(str, MARLIN_GROUPS))}"))
        elif not _marlin_shape(subject, out, row.shape[1]):
            faults.append((name, f"[{out}, {row.shape[1]}]: Marlin wants multiples of [64, 128]"
                           + ("" if subject.method == "awq" else " or [128, 64]")))
    yield from told("kernel on cuda", faults, "Marlin takes every weight")


def sglang_awq(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Marlin on a GPU, Intel's AMX on a CPU."""
    if subject.device == "cpu":
        yield VerifyCheck("kernel on cpu", "note", "its kernel needs a CPU with AMX")
    else:
        yield from sglang_wna16(subject)


def _marlin_shape(subject: CheckpointFacts, rows: int, cols: int) -> bool:
    """Its tiles; for AWQ, what SGLang checks itself, which is less than there is."""
    return not (rows % 64 or cols % 128) or (subject.method != "awq" and not (rows % 128 or cols % 64))


def sglang_gptq(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """What Marlin doesn't take goes to a kernel with float16 activations."""
    for check in gptq_types(subject):
        if check.status != "failed":
            yield check
        elif subject.dtype == "float16":
            yield VerifyCheck(check.name, "note",
                              "Marlin doesn't take every layer; a slower kernel with float16 "
                              "activations does")
        else:
            yield VerifyCheck(check.name, "failed",
                              check.detail + f"; others need float16 activations, not {subject.dtype}")
