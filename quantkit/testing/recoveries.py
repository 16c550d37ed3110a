"""The contract of recoveries: ``quantkit.quantization.recovery.base``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.recovery.base import Parameter, Recovery, Values
from quantkit.testing.contract import Contract, check_name, global_generators, same_tensors

WINDOWS = 12


class _Interruption(Exception):
    """Raised in place of a gradient where a run is stopped."""


class SampleTask:
    """A task of a few numbers, whose loss is the squared relative distance from known values.

    Args:
        stop: the number of gradients after which it raises an error; ``None``: it never does.
    """

    def __init__(self, stop: int | None = None) -> None:
        random = torch.Generator().manual_seed(0)
        scale, norm = torch.rand(8, 2, generator=random) + 0.5, torch.randn(6, generator=random)
        bias = torch.randn(5, generator=random)
        self.parameters: Mapping[str, Parameter] = {
            "model.layers.0.mlp.up_proj.scale": Parameter("scale", scale, scale),
            "model.layers.0.self_attn.q_proj.bias": Parameter("bias", bias, bias.square().mean().sqrt()),
            "model.norm.weight": Parameter("norm", norm, norm.abs())}
        self.windows, self.gradients, self._stop = WINDOWS, 0, stop
        self._best = {name: parameter.start + parameter.unit * 0.1 * torch.randn(
            parameter.start.shape, generator=random) for name, parameter in self.parameters.items()}
        self._state: dict[str, torch.Tensor] | None = None

    def loss(self, values: Values) -> float:
        """Of values of some parameters, the others as at the start."""
        return float(sum(off.square().sum() for off in self._off(values).values()))

    def gradient(self, values: Values, windows: Sequence[int]) -> tuple[float, dict[str, torch.Tensor]]:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        if self.gradients == self._stop:
            raise _Interruption
        self.gradients += 1
        noise = torch.Generator().manual_seed(sum(1 << window for window in windows))
        gradients = {name: 2 * off / self.parameters[name].unit.clamp(min=1e-3)
                  for name, off in self._off(values).items()}
        return self.loss(values), {name: gradient * (1 + 0.1 * torch.randn(gradient.shape, generator=noise))
                                   for name, gradient in gradients.items()}

    def saved(self) -> dict[str, torch.Tensor] | None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        state = self._state
        return None if state is None else {name: tensor.clone() for name, tensor in state.items()}

    def save(self, state: Values) -> None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""
        self._state = {name: tensor.clone() for name, tensor in state.items()}

    def tell(self, done: int, total: int) -> None:
        """See :class:`~quantkit.quantization.recovery.base.RecoveryTask`."""

    def go_on(self) -> None:
        """Stop no more."""
        self._stop = None

    def _off(self, values: Values) -> dict[str, torch.Tensor]:
        return {name: (values.get(name, parameter.start) - self._best[name]) / parameter.unit.clamp(min=1e-3)
                for name, parameter in self.parameters.items()}


def check_recovery(recovery: Recovery) -> None:
    """Let a recovery, with default options, train a few numbers whose best values are known, and check what
    ``quantkit.quantization.recovery.base`` promises: values of the parameters, a lower loss, the same result
    twice and after a stop, nothing written to the parameters, no global random generator.

    Args:
        recovery: the recovery.

    Raises:
        PluginError: a promise is broken.
    """
    contract = Contract(f"recovery {getattr(recovery, 'name', recovery)!r}",
                        "quantkit.quantization.recovery.base")
    contract.must(isinstance(recovery, Recovery), f"it is a {type(recovery).__name__}, not a Recovery")
    check_name(contract, "recoveries", recovery, recovery.name)
    contract.must(isinstance(recovery.paper, str) and recovery.paper.startswith(("https://", "http://")),
                  f"paper is {recovery.paper!r}; it must be a link")
    contract.must(isinstance(recovery.options, type) and issubclass(recovery.options, MethodOptions),
                  "options is no subclass of MethodOptions")
    options = contract.call("making its options with nothing given", recovery.options)
    task = SampleTask()
    starts = {name: parameter.start.clone() for name, parameter in task.parameters.items()}
    with global_generators(contract):
        values = _trained(contract, recovery, task, options)
        contract.must(all(torch.equal(task.parameters[name].start, start) for name, start in starts.items()),
                      "it writes to the parameters' start")
        contract.must(task.loss(values) < task.loss({}), "the loss of what it returns isn't lower")
        contract.must(same_tensors(values, _trained(contract, recovery, SampleTask(), options)),
                      "two runs differ")
        stopped = SampleTask(stop=task.gradients * 2 // 3)
        try:
            recovery.train(stopped, options)
        except _Interruption:
            stopped.go_on()
            contract.must(same_tensors(values, _trained(contract, recovery, stopped, options)),
                          "a run that was stopped and started again ends with other values")


def _trained(contract: Contract, recovery: Recovery, task: SampleTask,
             options: MethodOptions) -> dict[str, torch.Tensor]:
    values: Any = contract.call("train", recovery.train, task, options)
    contract.must(isinstance(values, dict), f"train returned a {type(values).__name__}, not a dictionary")
    for name, value in values.items():
        contract.must(name in task.parameters, f"train returned {name!r}, which is no parameter")
        contract.must(isinstance(value, torch.Tensor) and value.shape == task.parameters[name].start.shape,
                      f"train returned another shape for {name}")
        contract.must(bool(torch.isfinite(value).all()), f"train returned NaN or infinity for {name}")
    result: dict[str, torch.Tensor] = values
    return result
