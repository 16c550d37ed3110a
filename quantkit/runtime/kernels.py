"""Which runtime and kernels run a model here: the choices that loading makes, also without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv import gpu as kv_gpu
from quantkit.kv.build import build_kv_codecs
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.ops import gpu
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_machine import reason_against_kernels
from quantkit.ops.dispatch import Phase, choose, query_for
from quantkit.ops.stored_weight import PlainWeight
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.gpu import linears
from quantkit.runtime.gpu import model as gpu_model
from quantkit.support.errors import QuantkitError

PHASES: tuple[Phase, ...] = ("decode", "prefill")
Declined = tuple[tuple[str, str], ...]
Layer = QuantizedTensor | tuple[int, int]
"""A layer of a model: its quantized weight without the numbers, or the shape of an unquantized one."""


OPERATIONS = ("rms_norm", "rope + KV write", "decode attention", "prefill attention")
"""What isn't a matrix product, for people."""


@dataclass(frozen=True)
class OperationChoice:
    """Who runs an operation: ``triton``, ``cpu`` (kernels of ours) or ``torch``, and why torch."""

    op: str
    kernel: str
    reason: str | None


@dataclass(frozen=True)
class RuntimeChoice:
    """Which runtime runs a model.

    Attributes:
        runtime: ``gpu``: kernels on a GPU (``runtime/gpu/``). ``cpu``: one program of kernels on a CPU
            (``runtime/cpu/``). ``eager``: one operation after another through ``ops/``.
        reason: why it isn't one of the first two; ``None`` if it is.
    """

    runtime: Literal["gpu", "cpu", "eager"]
    reason: str | None = None


def choose_runtime(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   quantized: Mapping[str, QuantizedTensor]) -> RuntimeChoice:
    """The fastest runtime that can run a model.

    Args:
        dtype: the dtype of activations and plain weights.
        quantized: its quantized weights by name.
    """
    gpu_reason = gpu_model.reason_against(config, dtype, device, quantized)
    if gpu_reason is None:
        return RuntimeChoice("gpu")
    if device.type == "cuda":
        return RuntimeChoice("eager", gpu_reason)
    cpu_reason = cpu_model.reason_against(config, dtype, device, quantized)
    return RuntimeChoice("cpu") if cpu_reason is None else RuntimeChoice("eager", cpu_reason)


def linear_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   layers: Mapping[str, Layer]) -> dict[str, dict[Phase, tuple[str | None, Declined]]]:
    """The kernel that multiplies by each layer in each phase.

    Args:
        layers: all layers by name.

    Returns:
        For each layer and phase the kernel's name (``None``: no kernel takes the layer), and the kernels that
        declined before it with their reasons.
    """
    choice = _choice(config, dtype, device, layers)
    return {name: {phase: _linear_kernel(layer, dtype, device, choice, phase) for phase in PHASES}
            for name, layer in layers.items()}


def other_kernels(config: ModelConfig, kv: KVSpec, dtype: torch.dtype, device: torch.device,
                  layers: Mapping[str, Layer]) -> list[OperationChoice]:
    """What runs the operations that aren't matrix products, and why not a kernel of ours.

    Args:
        config, dtype, device, layers: as for :func:`linear_kernels`.
        kv: how keys and values are kept.
    """
    choice = _choice(config, dtype, device, layers)
    if choice.runtime == "cpu":
        reason = cpu_model.reason_against_cache(KVCache(config, kv, dtype))
    else:
        reason = choice.reason
    if device.type == "cpu" and choice.runtime != "gpu":
        return [OperationChoice(op, "torch" if reason else "cpu", reason) for op in OPERATIONS]
    norm = gpu.reason_against_norm(device.type, dtype, config.hidden_size)
    cache = reason or kv_gpu.reason_against_cache(build_kv_codecs(kv), dtype, config.head_dim,
                                                  config.num_heads // config.num_kv_heads, device.type)
    reasons = (norm, *[cache] * (len(OPERATIONS) - 1))
    return [OperationChoice(op, "torch" if reason else "triton", reason)
            for op, reason in zip(OPERATIONS, reasons)]


def _choice(config: ModelConfig, dtype: torch.dtype, device: torch.device,
            layers: Mapping[str, Layer]) -> RuntimeChoice:
    quantized = {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedTensor)}
    try:
        return choose_runtime(config, dtype, device, quantized)
    except QuantkitError as error:  # no kernel at all takes some weight
        return RuntimeChoice("eager", error.what)


def _linear_kernel(layer: Layer, dtype: torch.dtype, device: torch.device, choice: RuntimeChoice,
                   phase: Phase) -> tuple[str | None, Declined]:
    packs = device.type == "cpu" and reason_against_kernels() is None
    if isinstance(layer, QuantizedTensor):
        try:
            kernel = choose(query_for(layer, dtype, device, "decode" if packs else phase))
            if packs and not isinstance(kernel.kernel, CpuKernel):  # not packed: chosen for every product
                kernel = choose(query_for(layer, dtype, device, phase))
        except QuantkitError as error:
            return None, (("all", error.why or error.what),)
        return kernel.kernel.name, kernel.declined
    weight = PlainWeight(torch.empty(layer, dtype=dtype, device="meta"))
    if choice.runtime == "gpu":
        return linears.device_weight(Linear("", weight), dtype, device).name, ()
    if packs:
        return PlainWeight(torch.zeros(1, layer[1], dtype=dtype)).packed(dtype).name, ()
    return weight.kernel_name(dtype, device, phase), ()
