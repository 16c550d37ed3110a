"""Adam on scales and norms, towards the original model's logits.

The end-to-end phase of EfficientQAT, https://arxiv.org/abs/2407.11062, trains step sizes alone; the
fine-tuning of QuIP#, https://arxiv.org/abs/2402.04396, trains norms too, towards the original's outputs. A
scale is ``start · exp(d)``, a norm's weight ``start + d · |start|``, and ``d`` is trained: a learning rate is
relative to the size of what it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from quantkit.checkpoint.writer import WorkStore
from quantkit.quantization.methods.base import MethodOptions

Values = Mapping[str, torch.Tensor]
"""Parameters by name, float32 on the CPU."""
SAVED_EVERY = 4
"""Steps between two states that a stopped run goes on from."""
STATES = ("state-a", "state-b")
"""The state is kept in two places by turns, so that a run that is stopped while one is written has the
other."""
FLOOR = 0.05
"""Share of the learning rate that the last step has."""
STEP = "step"
FIRST = "first.{}"
SECOND = "second.{}"
DELTA = "delta.{}"
"""In a state: the number of finished steps; Adam's two moments and ``d`` of each parameter."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that can be trained.

    Attributes:
        kind: ``scale`` (of a quantized Linear), ``norm`` or ``bias``.
        start: its value in the quantized model, float32.
        unit: float32, broadcastable to ``start``: how large a value counts as large. A norm's is the absolute
            value of what it multiplies by, which in Gemma isn't what is stored.
    """

    kind: Literal["scale", "norm", "bias"]
    start: torch.Tensor
    unit: torch.Tensor

    def value(self, delta: torch.Tensor) -> torch.Tensor:
        """The value at a ``d``."""
        if self.kind == "scale":
            return self.start * delta.exp()
        return self.start + delta * self.unit

    def derivative(self, delta: torch.Tensor) -> torch.Tensor:
        """The derivative of :meth:`value` by ``d``."""
        return self.start * delta.exp() if self.kind == "scale" else self.unit


class DistillOptions(MethodOptions):
    """Options of ``distill``.

    Attributes:
        steps: steps of the optimizer; ``null`` means as many whole batches as there are training windows for.
        batch: windows of a step.
        lr: learning rate of scales, relative to their size; it falls to a twentieth as a cosine does.
        norm_lr: learning rate of norms and biases, relative to their size; 0 leaves them as they are.
        warmup: steps in which the learning rate rises.
        beta1: Adam's decay of the mean gradient.
        beta2: Adam's decay of the mean square of the gradient.
    """

    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=1, ge=1)
    lr: float = Field(default=3e-3, gt=0, le=1)
    norm_lr: float = Field(default=1e-3, ge=0, le=1)
    warmup: int = Field(default=4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)


def train(parameters: Mapping[str, Parameter], windows: int, options: DistillOptions, store: WorkStore,
          gradient: Callable[[Values, Sequence[int]], dict[str, torch.Tensor]],
          tell: Callable[[int, int], None]) -> dict[str, torch.Tensor]:
    """Train all parameters. A pass through the windows is in their order.

    Args:
        windows: the number of training windows.
        store: keeps the state for an attempt that goes on if this one is stopped.
        gradient: gives the gradient of the loss at some values, a mean over some windows, by name.
        tell: is told of finished steps and of all.
    """
    batch = min(options.batch, windows)
    total = options.steps or max(1, windows // batch)
    trained = {name: parameter for name, parameter in parameters.items()
               if parameter.kind == "scale" or options.norm_lr > 0}
    state = saved_state(store) or _begin(trained)
    for step in range(int(state[STEP]), total):
        tell(step, total)
        gradients = gradient(_values(parameters, state), [(step * batch + i) % windows for i in range(batch)])
        for name, parameter in trained.items():
            rate = options.lr if parameter.kind == "scale" else options.norm_lr
            slope = gradients[name] * parameter.derivative(state[DELTA.format(name)])
            _adam(state, name, slope, rate * _schedule(step, total, options), step, options)
        state[STEP] = torch.tensor(step + 1)
        if (step + 1) % SAVED_EVERY == 0:
            store.put(STATES[(step + 1) // SAVED_EVERY % 2], state)
    return _values(parameters, state)


def saved_state(store: WorkStore) -> dict[str, torch.Tensor] | None:
    """The newer state that an earlier attempt has left; ``None`` if there is none."""
    steps = {int(store.tensor(key, STEP)): key for key in STATES if store.has(key)}
    return store.get(steps[max(steps)]) if steps else None


def _begin(trained: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    return {STEP: torch.tensor(0)} | {kind.format(name): torch.zeros_like(parameter.start)
                                      for name, parameter in trained.items()
                                      for kind in (FIRST, SECOND, DELTA)}


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


def _values(parameters: Mapping[str, Parameter], state: Values) -> dict[str, torch.Tensor]:
    return {name: parameter.value(state[DELTA.format(name)]) if DELTA.format(name) in state
            else parameter.start for name, parameter in parameters.items()}
