"""The interface of recoveries: what trains a quantized model's scales and norms, and what it is given.

Codes stay as they are. What can be trained are the scales of quantized Linears, and the vectors of the
decoder layers and of the final norm, which aren't quantized: the norms' weights and the Linears' biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quantkit.quantization.methods.base import MethodOptions

Values = Mapping[str, torch.Tensor]
"""Parameters by name, float32 on the CPU."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that can be trained. Nothing may be written to it.

    Attributes:
        kind: ``scale`` (of a quantized Linear), ``norm`` or ``bias``.
        start: its value in the quantized model, float32, of the scale's or the vector's shape.
        unit: float32, broadcastable to ``start``: how large a value counts as large. A norm's is the absolute
            value of what it multiplies by, which in Gemma isn't what is stored.
    """

    kind: Literal["scale", "norm", "bias"]
    start: torch.Tensor
    unit: torch.Tensor


class RecoveryTask(Protocol):
    """A quantized model and text to train it on.

    Attributes:
        parameters: by name: ``model.layers.0.mlp.up_proj.scale``, ``model.norm.weight``.
        windows: the number of training windows of text.
    """

    parameters: Mapping[str, Parameter]
    windows: int

    def gradient(self, values: Values, windows: Sequence[int]) -> tuple[float, dict[str, torch.Tensor]]:
        """The divergence ``KL(original || quantized)`` of the next token with these parameters, a mean over
        the tokens of some training windows, and its gradient by name.

        Raises:
            NonFiniteError: a value isn't finite.
        """

    def saved(self) -> dict[str, torch.Tensor] | None:
        """What :meth:`save` was given last, maybe by an attempt that was stopped; ``None`` if nothing was."""

    def save(self, state: Values) -> None:
        """Keep tensors for an attempt that goes on if this one is stopped; durable when it returns."""

    def tell(self, done: int, total: int) -> None:
        """Report progress: ``done`` of ``total`` steps are finished."""


@dataclass(frozen=True)
class Recovery:
    """A registered recovery.

    Attributes:
        name: its name in recipes.
        paper: link to the paper.
        train: ``(task, options)`` → trained values of some or all of ``task.parameters``. It must depend on
            nothing else, and go on from ``task.saved()`` if there is something, so that a run that was
            stopped ends with the same bytes.
        options: its options' model.
    """

    name: str
    paper: str
    train: Callable[[RecoveryTask, MethodOptions], dict[str, torch.Tensor]]
    options: type[MethodOptions] = MethodOptions
