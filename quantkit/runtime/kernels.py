"""Which kernels will run a model here, without loading it: the same choices that loading makes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.errors import QuantkitError
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.kv import gpu as kv_gpu
from quantkit.kv.build import build_kv_codecs
from quantkit.kv.cache import KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.ops.cpu_linear import CpuKernel, CpuWeight, unavailable
from quantkit.ops.dispatch import Phase, choose
from quantkit.ops.linear import kernel_name, pack, query_for
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.gpu import linears
from quantkit.runtime.loader import choose_runtime
from quantkit.spec import KVSpec, QuantSpec

PHASES: tuple[Phase, ...] = ("decode", "prefill")
Declined = tuple[tuple[str, str], ...]
Layer = QuantizedTensor | tuple[int, int]
"""A layer of a model: its weight without the numbers, or the shape of one that isn't quantized."""


def unread(format: str, spec: QuantSpec, shape: tuple[int, int], dtype: str) -> QuantizedTensor:
    """A quantized weight of which only what kernels are chosen by is known."""
    return QuantizedTensor(format, spec, shape, FLOATS[dtype], {})


def linear_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   layers: Mapping[str, Layer]) -> dict[str, dict[Phase, tuple[str | None, Declined]]]:
    """By layer and phase the kernel that multiplies by it (``None``: none does), and who declined before it.

    Args:
        config: of the model.
        dtype: of activations.
        device: where it runs.
        layers: all of them by name.
    """
    way, _ = _way(config, dtype, device, layers)
    return {name: {phase: _chosen(layer, dtype, device, way, phase) for phase in PHASES}
            for name, layer in layers.items()}


def other_kernels(config: ModelConfig, kv: KVSpec, dtype: torch.dtype, device: torch.device,
                  layers: Mapping[str, Layer]) -> list[kv_gpu.OperationChoice]:
    """Who runs what isn't a matrix product, and why not a kernel of ours. Arguments as above.

    Args:
        kv: how keys and values are kept.
    """
    way, reason = _way(config, dtype, device, layers)
    if device.type != "cpu" or way == "gpu":
        return list(kv_gpu.choices(build_kv_codecs(kv), dtype, config.hidden_size, config.head_dim,
                                   config.num_heads // config.num_kv_heads, device.type, reason))
    if way == "cpu":
        reason = cpu_model.cache_declines(KVCache(config, kv, dtype))
    return [kv_gpu.OperationChoice(op, "torch" if reason else "cpu", reason) for op in kv_gpu.OPERATIONS]


def _way(config: ModelConfig, dtype: torch.dtype, device: torch.device,
         layers: Mapping[str, Layer]) -> tuple[str, str | None]:
    quantized = {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedTensor)}
    try:
        return choose_runtime(config, dtype, device, quantized)
    except QuantkitError as error:  # no kernel at all takes some weight
        return "operations", error.what


def _chosen(layer: Layer, dtype: torch.dtype, device: torch.device, way: str,
            phase: Phase) -> tuple[str | None, Declined]:
    own = device.type == "cpu" and unavailable() is None
    if isinstance(layer, QuantizedTensor):
        try:
            choice = choose(query_for(layer, dtype, device, "decode" if own else phase))
            if own and not isinstance(choice.kernel, CpuKernel):  # not packed: chosen again in every product
                choice = choose(query_for(layer, dtype, device, phase))
        except QuantkitError as error:
            return None, (("all", error.why or error.what),)
        return choice.kernel.name, choice.declined
    weight = torch.empty(layer, dtype=dtype, device="meta")
    if way == "gpu":
        return linears.device_weight(Linear("", weight), dtype, device).name, ()
    if own and isinstance(packed := pack(torch.zeros(1, layer[1], dtype=dtype), dtype), CpuWeight):
        return packed.name, ()
    return kernel_name(weight, dtype, device, phase), ()
