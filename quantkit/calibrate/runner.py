"""Pushes calibration tokens through a model, one decoder layer at a time.

Each layer sees what the *quantized* layers before it produce, so that it can answer for their
errors, as in GPTQ, https://arxiv.org/abs/2210.17323. In memory are one layer and the hidden states; these
are on disk where memory has no room for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from quantkit.calibrate.finite import NonFiniteError, first_nonfinite, require_finite_states
from quantkit.calibrate.sizes import BATCH_TOKENS
from quantkit.calibrate.spill import Spill
from quantkit.calibrate.stats import HessianObserver
from quantkit.formats.base import QuantizedTensor
from quantkit.methods.base import LayerStats
from quantkit.models.architecture import EMBEDDING, linear_slots
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import RMSNorm, embedded
from quantkit.models.linear import Weights
from quantkit.ops.hadamard import undo_hadamard
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight, StoredWeight

EXPERT = ".experts."
"""What the names of an expert's layers hold."""


class LayerRunner:
    """Hidden states between two layers, and the layer being worked on.

    For every layer in order: :meth:`measure` (or not, if nothing needs it), then :meth:`advance`.

    Args:
        config: the model's.
        weights: the *original* model's; computing happens in its dtype and on its device.
        tokens: int64 ``[samples, length]``.
        importance: of each token for each Linear, float32 ``[samples · length]`` by full name;
            ``None``: all tokens count the same.
        states: where hidden states are kept; in memory by default.
        table: the embedding, if it is quantized already.
        correlation: factor on Hessians beside their diagonals; below 1 where tokens are no text.

    Attributes:
        next: index of the layer that the hidden states are the input of.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokens: torch.Tensor,
                 importance: Mapping[str, torch.Tensor] | None = None, states: Spill | None = None,
                 table: QuantizedTensor | None = None, correlation: float = 1.0) -> None:
        self._config, self._weights, self._importance = config, weights, importance
        self._correlation = correlation
        self._shares = {slot.name: slot.shares for slot in linear_slots(config)}
        self._layer: DecoderLayer | None = None
        self.next = 0
        samples, length = tokens.shape
        self._batch = max(1, BATCH_TOKENS // length)
        self._states, self._batches = states or Spill(None), -(-samples // self._batch)
        positions = torch.arange(length, device=weights.device)
        self._positions = positions.expand(min(self._batch, samples), length)
        for i, x in enumerate(embeddings(config, weights, tokens, self._batch, table)):
            self._states.put(str(i), x)

    @torch.no_grad()
    def measure(self, index: int,
                wanted: Mapping[str, Collection[str]] | None = None) -> dict[str, LayerStats]:
        """Statistics of the inputs of layer ``index``, by the full name of the Linear that they enter.

        Linears that share an input share its statistics too; a token counts there as it does for them on
        average. An expert's are of the tokens that were sent to it; of one that got none they are zeros.

        Args:
            index: must be :attr:`next`.
            wanted: full names of the layers that need statistics, and which; all of all by default. Who needs
                no ``"hessian"`` isn't given one, unless it shares its input with one who does.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
            CalibrationError: nothing reached a Linear, or its Hessian overflows.
        """
        layer = self._current(index)
        linears = layer.linears()
        names = [name for name in linears if wanted is None or name in wanted]
        key = {name: self._shares[name] for name in names}
        formed = {key[name] for name in names if wanted is None or "hessian" in wanted[name]}
        observers: dict[str, HessianObserver] = {}
        for name in names:
            if key[name] not in observers:
                observers[key[name]] = linears[name].observer = HessianObserver(
                    name, self._importance_of([other for other in names if key[other] == key[name]]),
                    linears[name].shape[1] if EXPERT in name else None, key[name] in formed,
                    self._correlation)
        try:
            first = 0
            for i in range(self._batches if observers else 0):
                x = self._states.get(str(i)).to(self._positions.device)
                for observer in observers.values():
                    observer.first = first
                try:
                    self._forward(layer, x)
                except NonFiniteError as error:
                    raise self._traced(layer, i, x, error) from None
                first += x.shape[0] * x.shape[1]
        finally:
            for linear in linears.values():
                linear.observer = None
        statistics = {key_of_input: observer.result() for key_of_input, observer in observers.items()}
        return {name: statistics[key[name]] for name in names}

    def forget(self, names: Collection[str]) -> None:
        """Let go of weights of the layer that was measured, which :meth:`advance` will be given anew."""
        if self._layer is not None:
            for name, linear in self._layer.linears().items():
                if name in names:
                    linear.weight = PlainWeight(torch.empty(0, 0))

    @torch.no_grad()
    def advance(self, index: int, replaced: Mapping[str, torch.Tensor | QuantizedTensor],
                changed: Mapping[str, torch.Tensor] | None = None) -> None:
        """Push the hidden states through layer ``index`` with some weights replaced, and drop it.

        Args:
            index: must be :attr:`next`.
            replaced: new weights ``[out, in]`` by the full name of their layer.
            changed: other new tensors of the layer (norms, biases, a router's, a kept weight), by full name.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
        """
        layer = self._current(index) if not changed else DecoderLayer(
            self._config, index, self._weights.with_changed(changed))
        linears = layer.linears()
        for name, weight in replaced.items():
            linears[name].weight = PlainWeight(self._plain(weight))
        self._layer = None
        for i in range(self._batches):
            x = self._states.take(str(i)).to(self._positions.device)
            result = self._forward(layer, x)
            try:
                require_finite_states(result, i * self._batch, f"model.layers.{index}", index)
            except NonFiniteError as error:
                raise self._traced(layer, i, x, error) from None
            self._states.put(str(i), result)
        self.next += 1

    @torch.no_grad()
    def measure_head(self, name: str) -> LayerStats:
        """Statistics of what the head multiplies: what the last layer leaves, normalized. All layers must
        have been advanced through.

        Args:
            name: of the head, ``model.embed_tokens`` where it is that.

        Raises:
            NonFiniteError: a value isn't finite; sample and tensor are named.
            CalibrationError: its Hessian overflows.
        """
        if self.next != self._config.num_layers:
            raise ValueError(f"the head was asked for, the hidden states are at {self.next}")
        norm = RMSNorm("model.norm", self._config.hidden_size, self._config, self._weights)
        observer = HessianObserver(name, self._importance_of([name]),
                                   correlation=self._correlation)
        samples = (state for i in range(self._batches) for state in self._states.get(str(i)))
        for sample, x in enumerate(samples):
            observer.first = sample * x.shape[0]
            try:
                observer(norm(x.to(self._positions.device)))
            except NonFiniteError as error:
                raise NonFiniteError(error.tensor, sample=sample, why=error.why) from None
        return observer.result()

    def _importance_of(self, names: Sequence[str]) -> torch.Tensor | None:
        """Of each token, for Linears that share an input: the mean."""
        weights = [self._importance[name] for name in names if self._importance and name in self._importance]
        return torch.stack(weights).mean(0) if weights else None

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
            weight = undo_hadamard(weight) if rotated else weight
        return weight.to(device=self._weights.device, dtype=self._weights.dtype)

    def _traced(self, layer: DecoderLayer, batch: int, entered: torch.Tensor,
                error: NonFiniteError) -> NonFiniteError:
        """The same with sample and tensor."""
        first_error = first_nonfinite(lambda x: self._forward(layer, x), layer.linears(), entered,
                                      batch * self._batch, self.next)
        return first_error or error


def embeddings(config: ModelConfig, weights: Weights, tokens: torch.Tensor, batch: int,
               table: QuantizedTensor | None = None) -> Iterator[torch.Tensor]:
    """What enters the first layer, ``[batch, length, hidden]`` at a time; of the table only the rows of these
    tokens are in memory, unless it is given, quantized. Raises NonFiniteError for one that isn't finite."""
    stored: StoredWeight
    if table is None:
        used, places = tokens.unique(return_inverse=True)
        stored = PlainWeight(weights.rows(f"{EMBEDDING}.weight", used))
    else:
        stored, places = QuantizedWeight(table), tokens
    for i, part in enumerate(places.split(batch)):
        x = embedded(config, part.to(weights.device), stored, weights.dtype)
        require_finite_states(x, i * batch, "the embedding")
        yield x
