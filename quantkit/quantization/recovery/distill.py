"""``distill``: end-to-end training of scales and norms by Adam, towards the original model's logits.

The end-to-end phase of EfficientQAT, https://arxiv.org/abs/2407.11062, trains step sizes alone; the
fine-tuning of QuIP#, https://arxiv.org/abs/2402.04396, trains norms too, towards the original's outputs. A
scale is ``start · exp(d)``, a norm's weight ``start + d · |start|``, and ``d`` is trained: a learning rate is
relative to the size of what it changes.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field

from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.recovery.base import Parameter, Recovery, RecoveryTask

SAVED_EVERY = 4
"""Steps between two states that a stopped run goes on from."""
FLOOR = 0.05
"""Share of the learning rate that the last step has."""
STEP, FIRST, SECOND, DELTA = "step", "first.{}", "second.{}", "delta.{}"
"""In what is saved: the number of finished steps; Adam's moments; each parameter's ``d``."""


class DistillOptions(MethodOptions):
    """Options of ``distill``.

    Attributes:
        steps: of the optimizer; ``null``: as many whole batches as there are training windows for.
        batch: windows of a step.
        lr: learning rate of scales, relative to their size; it falls to a twentieth as a cosine does.
        norm_lr: learning rate of norms and biases, relative to their size; 0 leaves them as they are.
        warmup: steps in which the learning rate rises.
        beta1, beta2: Adam's decay of the mean gradient and of its mean square.
    """

    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=1, ge=1)
    lr: float = Field(default=3e-3, gt=0, le=1)
    norm_lr: float = Field(default=1e-3, ge=0, le=1)
    warmup: int = Field(default=4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)


def train(task: RecoveryTask, options: MethodOptions) -> dict[str, torch.Tensor]:
    """Train all parameters of the task. A pass through the windows is in their order."""
    assert isinstance(options, DistillOptions)
    batch = min(options.batch, task.windows)
    total = options.steps or max(1, task.windows // batch)
    trained = {name: parameter for name, parameter in task.parameters.items()
               if parameter.kind == "scale" or options.norm_lr > 0}
    saved = task.saved()
    state = _begin(trained) if saved is None else saved
    for step in range(int(state[STEP]), total):
        task.tell(step, total)
        windows = [(step * batch + i) % task.windows for i in range(batch)]
        _, gradients = task.gradient(_values(task, trained, state), windows)
        for name, parameter in trained.items():
            rate = options.lr if parameter.kind == "scale" else options.norm_lr
            gradient = gradients[name] * _derivative(parameter, state[DELTA.format(name)])
            _adam(state, name, gradient, rate * _schedule(step, total, options), step, options)
        state[STEP] = torch.tensor(step + 1)
        if (step + 1) % SAVED_EVERY == 0:
            task.save(state)
    return _values(task, trained, state)


def _begin(trained: dict[str, Parameter]) -> dict[str, torch.Tensor]:
    kinds = (FIRST, SECOND, DELTA)
    return {STEP: torch.tensor(0)} | {kind.format(name): torch.zeros_like(parameter.start)
                                      for name, parameter in trained.items() for kind in kinds}


def _schedule(step: int, total: int, options: DistillOptions) -> float:
    """The share of the learning rate at a step: a line up, then a cosine down."""
    warmup = min(options.warmup, total - 1)
    rising = min(1.0, (step + 1) / (warmup + 1))
    falling = 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / max(1, total - warmup))
    return rising * (FLOOR + (1 - FLOOR) * falling)


def _adam(state: dict[str, torch.Tensor], name: str, gradient: torch.Tensor, rate: float, step: int,
          options: DistillOptions) -> None:
    first, second = state[FIRST.format(name)], state[SECOND.format(name)]
    first.mul_(options.beta1).add_(gradient, alpha=1 - options.beta1)
    second.mul_(options.beta2).addcmul_(gradient, gradient, value=1 - options.beta2)
    mean = first / (1 - options.beta1 ** (step + 1))
    size = (second / (1 - options.beta2 ** (step + 1))).sqrt_().add_(1e-12)
    state[DELTA.format(name)].sub_(mean.div_(size), alpha=rate)


def _value(parameter: Parameter, delta: torch.Tensor) -> torch.Tensor:
    if parameter.kind == "scale":
        return parameter.start * delta.exp()
    return parameter.start + delta * parameter.unit


def _derivative(parameter: Parameter, delta: torch.Tensor) -> torch.Tensor:
    """The derivative of :func:`_value` by ``delta``."""
    return parameter.start * delta.exp() if parameter.kind == "scale" else parameter.unit


def _values(task: RecoveryTask, trained: dict[str, Parameter],
            state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _value(parameter, state[DELTA.format(name)]) if name in trained else parameter.start
            for name, parameter in task.parameters.items()}


RECOVERY = Recovery(name="distill", paper="https://arxiv.org/abs/2407.11062", train=train,
                    options=DistillOptions)
