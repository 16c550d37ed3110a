"""Pushes calibration tokens through a model, one decoder layer at a time.

Each layer sees what the *quantized* layers before it produce, so that it can answer for their
errors, as in GPTQ, https://arxiv.org/abs/2210.17323. In memory are one layer and the hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from quantkit.calibrate.finite import NonFiniteError, first_nonfinite, require_finite_states
from quantkit.calibrate.stats import HessianObserver
from quantkit.formats.base import QuantizedTensor
from quantkit.methods.base import LayerStats
from quantkit.models.architecture import linear_slots
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import embedded
from quantkit.models.linear import Weights
from quantkit.ops.rotation import unrotate

EMBEDDING = "model.embed_tokens.weight"
EXPERT = ".experts."
"""What the names of an expert's layers hold."""
BATCH_TOKENS = 4096
"""Tokens in one forward pass of a layer: enough to keep the cores busy, few enough to stay small."""


class LayerRunner:
    """Hidden states between two layers, and the layer being worked on.

    For every layer in order: :meth:`measure` (or not, if nothing needs it), then :meth:`advance`.

    Args:
        config: the model's.
        weights: the *original* model's; computing happens in its dtype and on its device.
        tokens: int64 ``[samples, length]``.
        importance: of each token for each Linear, float32 ``[samples · length]`` by full name;
            ``None``: all tokens count the same.

    Attributes:
        next: index of the layer that the hidden states are the input of.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokens: torch.Tensor,
                 importance: Mapping[str, torch.Tensor] | None = None) -> None:
        self._config, self._weights, self._importance = config, weights, importance
        self._shares = {slot.name: slot.shares for slot in linear_slots(config)}
        self._layer: DecoderLayer | None = None
        self.next = 0
        samples, length = tokens.shape
        self._batch = max(1, BATCH_TOKENS // length)
        table = weights.tensor(EMBEDDING)
        self._states = [embedded(config, part.to(table.device), table) for part in tokens.split(self._batch)]
        self._positions = torch.arange(length, device=table.device).expand(min(self._batch, samples), length)
        for i, states in enumerate(self._states):
            require_finite_states(states, i * self._batch, "the embedding")

    @torch.no_grad()
    def measure(self, index: int, wanted: Collection[str] | None = None) -> dict[str, LayerStats]:
        """Statistics of the inputs of layer ``index``, by the full name of the Linear that they enter.

        Linears that share an input share its statistics too, unless tokens have an importance. An expert's
        are of the tokens that were sent to it; of one that got none they are zeros.

        Args:
            index: must be :attr:`next`.
            wanted: full names of the layers that need statistics; all by default.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
            CalibrationError: nothing reached a Linear, or its Hessian overflows.
        """
        layer = self._current(index)
        linears = layer.linears()
        names = [name for name in linears if wanted is None or name in wanted]
        key = {name: name if self._importance else self._shares[name] for name in names}
        observers: dict[str, HessianObserver] = {}
        for name in names:
            if key[name] not in observers:
                observers[key[name]] = linears[name].observer = HessianObserver(
                    name, self._importance[name] if self._importance else None,
                    linears[name].shape[1] if EXPERT in name else None)
        try:
            first = 0
            for i, states in enumerate(self._states if observers else ()):
                for observer in observers.values():
                    observer.first = first
                try:
                    self._forward(layer, states)
                except NonFiniteError as error:
                    raise self._traced(layer, i, error) from None
                first += states.shape[0] * states.shape[1]
        finally:
            for linear in linears.values():
                linear.observer = None
        found = {one: observer.result() for one, observer in observers.items()}
        return {name: found[key[name]] for name in names}

    @torch.no_grad()
    def advance(self, index: int, replaced: Mapping[str, torch.Tensor | QuantizedTensor]) -> None:
        """Push the hidden states through layer ``index`` with some weights replaced, and drop it.

        Args:
            index: must be :attr:`next`.
            replaced: new weights ``[out, in]`` by the full name of their layer.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
        """
        layer = self._current(index)
        linears = layer.linears()
        for name, weight in replaced.items():
            linears[name].weight = self._plain(weight)
        self._layer = None
        for i, states in enumerate(self._states):
            left = self._forward(layer, states)
            try:
                require_finite_states(left, i * self._batch, f"model.layers.{index}", index)
            except NonFiniteError as error:
                raise self._traced(layer, i, error) from None
            self._states[i] = left
        self.next += 1

    def _current(self, index: int) -> DecoderLayer:
        if index != self.next:
            raise ValueError(f"layer {index} was asked for, the hidden states are at {self.next}")
        if self._layer is None:
            self._layer = DecoderLayer(self._config, index, self._weights)
        return self._layer

    def _forward(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        return layer(states, self._positions[:states.shape[0]], None)

    def _plain(self, weight: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            from quantkit.plugins import registry

            rotated = weight.spec.rotation is not None
            weight = registry("formats").get(weight.format).dequantize(weight)
            assert isinstance(weight, torch.Tensor)
            weight = unrotate(weight) if rotated else weight
        return weight.to(device=self._weights.device, dtype=self._weights.dtype)

    def _traced(self, layer: DecoderLayer, batch: int, error: NonFiniteError) -> NonFiniteError:
        """The same with sample and tensor."""
        found = first_nonfinite(lambda x: self._forward(layer, x), layer.linears(), self._states[batch],
                                batch * self._batch, self.next)
        return found or error
