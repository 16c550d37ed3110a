"""Chooses the runtime that runs a model, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.models.config import ModelConfig
from quantkit.runtime.cpu.model import declines as cpu_declines
from quantkit.runtime.gpu.model import declines as gpu_declines


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
        config: the model's shape.
        dtype: of activations and plain weights.
        device: where it is to run.
        quantized: its quantized weights by name.
    """
    gpu_reason = gpu_declines(config, dtype, device, quantized)
    if gpu_reason is None:
        return RuntimeChoice("gpu")
    if device.type == "cuda":
        return RuntimeChoice("eager", gpu_reason)
    cpu_reason = cpu_declines(config, dtype, device, quantized)
    return RuntimeChoice("cpu") if cpu_reason is None else RuntimeChoice("eager", cpu_reason)
