"""Tells from config and layers whether another engine loads a checkpoint, without starting that engine.

The rules are those of vLLM 0.33 (0.32 on CPUs), SGLang 0.5.23, transformers 5.23 and mlx-lm 0.32, read from
their sources and tried where a CPU could.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from quantkit.checkpoint import engine_rules as rules
from quantkit.checkpoint import float_rules, mlx_rules
from quantkit.checkpoint.checks import VerifyCheck
from quantkit.checkpoint.manifest import LayerRow
from quantkit.checkpoint.quantization_config import stored_quantization
from quantkit.models.architecture import EMBEDDING, linear_slots, parse_config
from quantkit.plugins.manager import registry
from quantkit.support.errors import UsageError, did_you_mean

DEVICES = ("cuda", "cpu")
FLOATS = (float_rules.one_global_scale, float_rules.whole_inputs, float_rules.whole_rows)
COMPRESSED = (rules.layouts("pack-quantized", *rules.BYTES, *rules.FP4), rules.rounded_inputs)
ENGINES: dict[str, dict[str, tuple[rules.Rule, ...]]] = {
    "vllm": {
        "compressed-tensors": (*COMPRESSED, rules.grouped_or_channel, rules.same_scheme, rules.vllm_kernel,
                               rules.vllm_rounded_inputs, rules.vllm_embedding, *FLOATS),
        "fp8": (rules.same_scheme, rules.vllm_kernel, float_rules.whole_inputs),
        "gptq": (rules.no_order, rules.gptq_types, rules.same_scheme, rules.vllm_kernel, rules.half_scales),
        "awq": (rules.same_scheme, rules.vllm_kernel, rules.half_scales),
        "mxfp4": (rules.bfloat16_experts,)},
    "sglang": {
        "compressed-tensors": (*COMPRESSED, rules.sglang_gpu, rules.grouped_or_channel, rules.same_scheme,
                               rules.sglang_wna16, rules.plain_embedding, float_rules.sglang_floats, *FLOATS),
        "fp8": (float_rules.sglang_amx, rules.same_scheme, float_rules.sglang_floats, *FLOATS),
        "gptq": (rules.sglang_gpu, rules.sglang_gptq, rules.same_scheme, rules.half_scales),
        "awq": (rules.same_scheme, rules.sglang_awq, rules.half_scales),
        "bitsandbytes": (rules.sglang_gpu, rules.same_scheme, rules.needs("bitsandbytes")),
        "mxfp4": (rules.sglang_gpu, rules.bfloat16_experts)},
    "transformers": {
        "compressed-tensors": (COMPRESSED[0], rules.zero_points, float_rules.whole_inputs,
                               rules.dequantized_embedding, rules.needs("compressed-tensors accelerate")),
        "fp8": (float_rules.whole_squares, rules.needs("accelerate")),
        "gptq": (rules.gptq_kept, rules.plain_head, rules.no_experts, rules.needs("optimum gptqmodel")),
        "awq": (rules.plain_head, rules.no_experts, rules.needs("gptqmodel accelerate")),
        "bitsandbytes": (rules.no_experts, rules.needs("bitsandbytes accelerate")),
        "mxfp4": (rules.dequantized_experts, rules.needs("accelerate"))},
    "mlx": {
        "mlx": (*mlx_rules.MODEL, rules.needs("mlx-lm")),
        "mxfp4": (*mlx_rules.MODEL, rules.needs("mlx-lm")),
        "awq": (*mlx_rules.MODEL, mlx_rules.awq_groups, rules.plain_embedding, rules.needs("mlx-lm"))}}
"""By engine and ``quant_method``, the rules that are asked, in order."""
EXTRA = {("vllm", "bitsandbytes"): ": vLLM 0.33 left it to a plugin; export it, or quantize to int4",
         ("vllm", "quantkit"): ": no standard says this mix",
         ("sglang", "quantkit"): ": no standard says this mix",
         ("transformers", "quantkit"): ": no standard says this mix",
         ("mlx", "quantkit"): ": no standard says this mix"}


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
        checkpoint: opened.
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
    subject = rules.CheckpointFacts(
        quantization.get("quant_method"), quantization, rows, tuple(row for row in rows if row.spec),
        next((row for row in layers if row.name == EMBEDDING and row.spec), None), shape.tie_word_embeddings,
        {slot.name: slot.shares for slot in linear_slots(shape)}, device, dtype, config, shape,
        global_scales or {})
    if subject.method is None:
        return (VerifyCheck("quant_method", "ok", "nothing is quantized"),)
    readers = ENGINES[engine]
    if subject.method not in readers:
        return (VerifyCheck("quant_method", "failed",
                            f"{engine} reads {', '.join(readers)}, not {subject.method}"
                            + (EXTRA.get((engine, subject.method)) or _remedy(engine, subject))),)
    checks = [VerifyCheck("quant_method", "ok", subject.method)]
    for rule in (rules.joined_experts, *readers[subject.method]):
        checks += rule(subject)
    return tuple(checks)


def sort_engines(check: Callable[[str], Sequence[VerifyCheck]]) -> tuple[list[str], list[str]]:
    """The engines that load a checkpoint, and those that refuse it.

    Args:
        check: what an engine would say of it.
    """
    refuse = [engine for engine in ENGINES if any(answer.status == "failed" for answer in check(engine))]
    return [engine for engine in ENGINES if engine not in refuse], refuse


def _remedy(engine: str, subject: rules.CheckpointFacts) -> str:
    """The export that makes an engine's own layout of these layers without rounding, if there is one."""
    form = registry("formats").get("mlx")
    exact = engine == "mlx" and all(
        row.spec and row.spec.scale_dtype in ("model", row.dtype)
        and form.refuses(row.spec, row.shape) is None for row in subject.packed)
    return "; quantkit export DIR --to mlx OUT" if exact else ""
