"""The loss of a quantized model and its gradient by scales and norms: one layer's graph in memory at a time.

Forward, what enters each layer is kept on a spill; backward, a layer runs again with its autograd graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantkit.formats.base import Format, QuantizedTensor
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import RMSNorm
from quantkit.models.linear import Weights
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.ops.rows import softcapped
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.finite import NonFiniteError, behind, check_finite_states
from quantkit.quantization.calibration.runner import embeddings
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.memory import BACKWARD_LOGITS, BACKWARD_TOKENS
from quantkit.support.errors import RecipeError
from quantkit_recover.optimizer import Values

NORM = "model.norm"
SCALE = ".scale"
"""Ends the name of the scales of a Linear."""


@dataclass(frozen=True)
class Heads:
    """Matrices ``[vocab, hidden]`` that make logits of normalized hidden states.

    Attributes:
        original: the head of the original model.
        quantized: the head of the quantized model; the same tensor if the head isn't quantized.
        softcap: the soft cap of the logits, if the model has any.
    """

    original: torch.Tensor
    quantized: torch.Tensor
    softcap: float | None


@dataclass(frozen=True)
class Divergence:
    """``KL(original || quantized)``, summed over some tokens and divided by the number of all.

    Attributes:
        gradient: its gradient at the last layer's states; zeros where none is wanted.
        norm_gradient: its gradient at the final norm's weight, if it is wanted.
    """

    loss: float
    gradient: torch.Tensor
    norm_gradient: torch.Tensor | None


class QuantizedWalk:
    """A quantized model, read a layer at a time.

    Args:
        weights: the original model's; computing happens in its dtype and on its device.
        stored: a decoder layer's packed weights by the full names of their Linears.
        starts: the values that all parameters have in what is stored.
        table: the embedding, if it is quantized.
        heads: the heads of the original and of the quantized model.
        spill: keeps what enters the layers.
    """

    def __init__(self, config: ModelConfig, weights: Weights,
                 stored: Callable[[int], Mapping[str, QuantizedTensor]], starts: Values,
                 table: QuantizedTensor | None, heads: Heads, spill: Spill) -> None:
        self._config, self._weights = config, weights
        self._stored, self._starts = stored, starts
        self._table, self._heads = table, heads
        self._spill = spill

    @torch.inference_mode(False)
    def loss(self, values: Values, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """The divergence from the original, a mean over tokens.

        Args:
            values: the values of all parameters.
            tokens: int64 ``[windows, length]``.
            targets: the states that the original's final norm gives of them, ``[windows, length, hidden]``.

        Raises:
            NonFiniteError: a value isn't finite; layer and tensor are named.
        """
        return self._run(values, tokens, targets, None)

    @torch.inference_mode(False)
    def gradient(self, values: Values, tokens: torch.Tensor,
                 targets: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        """:meth:`loss`, and its gradient by each parameter, float32 on the CPU."""
        gradients: dict[str, torch.Tensor] = {}
        loss = self._run(values, tokens, targets, gradients)
        for index in reversed(range(self._config.num_layers)):
            self._backward(index, values, tokens, gradients)
        return loss, gradients

    @torch.no_grad()
    def _run(self, values: Values, tokens: torch.Tensor, targets: torch.Tensor,
             gradients: dict[str, torch.Tensor] | None) -> float:
        batch, layers = self._batch(tokens), self._config.num_layers
        for i, x in enumerate(embeddings(self._config, self._weights, tokens, batch, self._table)):
            self._spill.put(_key(0, i), x)
        parts = range(-(-tokens.shape[0] // batch))
        for index in range(layers):
            layer = DecoderLayer(self._config, index, self._with_values(index, values, {}, {}))
            for i in parts:
                x = (self._spill.take if gradients is None else self._spill.get)(_key(index, i))
                y = layer(x.to(self._weights.device), self._positions(x), None)
                check_finite_states(y, i * batch, behind(index), index)
                self._spill.put(_key(index + 1, i), y)
        name, loss = f"{NORM}.weight", 0.0
        wanted = gradients is not None
        leaf = values[name].to(self._weights.device).clone().requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            norm = RMSNorm(NORM, self._config.hidden_size, self._config,
                           self._weights.with_changed({name: leaf}))
        for i, target in zip(parts, targets.split(batch), strict=True):
            x = self._spill.take(_key(layers, i)).to(self._weights.device)
            part = divergence(self._heads, norm, x.flatten(0, 1), target.to(x).flatten(0, 1), tokens.numel(),
                              leaf if wanted else None)
            loss += part.loss
            if gradients is not None and part.norm_gradient is not None:
                self._spill.put(_gradient_key(layers, i), part.gradient.view(x.shape))
                _add(gradients, name, part.norm_gradient.cpu())
        return loss

    def _backward(self, index: int, values: Values, tokens: torch.Tensor,
                  gradients: dict[str, torch.Tensor]) -> None:
        leaves: dict[str, torch.Tensor] = {}
        scaled: dict[str, ScaledWeight] = {}
        with torch.enable_grad():
            layer = DecoderLayer(self._config, index, self._with_values(index, values, leaves, scaled))
        for i in range(-(-tokens.shape[0] // self._batch(tokens))):
            x = self._spill.take(_key(index, i)).to(self._weights.device)
            gradient = self._spill.take(_gradient_key(index + 1, i)).to(self._weights.device)
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                y = layer(x, self._positions(x), None)
            entered, *more = torch.autograd.grad(y, [x, *leaves.values()], gradient)
            if index:
                self._spill.put(_gradient_key(index, i), entered)
            for name, gradient in zip(leaves, more, strict=True):
                linear = name.removesuffix(".weight")
                if linear in scaled:
                    _add(gradients, linear + SCALE, scaled[linear].gradient(gradient))
                else:
                    _add(gradients, name, gradient.cpu())
            del more, gradient

    def _with_values(self, index: int, values: Values, leaves: dict[str, torch.Tensor],
                     scaled: dict[str, ScaledWeight]) -> Weights:
        """The layer's weights with these parameters. ``leaves`` gets its trained vectors and weights,
        ``scaled`` what makes the weights."""
        device, prefix = self._weights.device, f"model.layers.{index}."
        grad = torch.is_grad_enabled()
        for name, packed in self._stored(index).items():
            weight = ScaledWeight(packed, self._starts[name + SCALE], device)
            leaves[f"{name}.weight"] = weight.weight(values[name + SCALE]).detach().requires_grad_(grad)
            if grad:
                scaled[name] = weight
        for name in values:
            if name.startswith(prefix) and not name.endswith(SCALE):
                leaves[name] = values[name].to(device).clone().requires_grad_(grad)
        return self._weights.with_changed(leaves)

    def _batch(self, tokens: torch.Tensor) -> int:
        return max(1, BACKWARD_TOKENS // tokens.shape[1])

    def _positions(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1], device=self._weights.device).expand(x.shape[:2])


def divergence(heads: Heads, norm: RMSNorm, states: torch.Tensor, targets: torch.Tensor, count: int,
               weight: torch.Tensor | None = None) -> Divergence:
    """How far the next-token distributions of some tokens are from the original's.

    Args:
        heads: the heads of both models.
        norm: the quantized model's final norm.
        states: the states that its last layer leaves, ``[tokens, hidden]``.
        targets: the states that the original model's final norm gives, of the same shape.
        count: the number of tokens that the mean is taken over.
        weight: the leaf that ``norm`` was made of, if gradients are wanted.

    Raises:
        NonFiniteError: a logit isn't finite.
    """
    rows = max(1, -(-BACKWARD_LOGITS // heads.original.shape[0]))
    gradients, total = torch.zeros_like(states), 0.0
    weight_gradient = None if weight is None else torch.zeros_like(weight)
    for start in range(0, states.shape[0], rows):
        part = slice(start, start + rows)
        with torch.set_grad_enabled(weight is not None):
            entered = states[part].detach().requires_grad_(weight is not None)
            normed = norm(entered)
        logits = softcapped((normed.detach() @ heads.quantized.T).float(), heads.softcap)
        target_logits = softcapped((targets[part] @ heads.original.T).float(), heads.softcap)
        target_log_probs = F.log_softmax(target_logits, dim=-1)
        del target_logits
        log_probs = F.log_softmax(logits, dim=-1)
        target_probs = target_log_probs.exp()
        loss = float((target_log_probs.sub_(log_probs).mul_(target_probs)).double().sum())
        if not math.isfinite(loss):
            raise NonFiniteError("the model's output is NaN or infinite")
        total += loss
        if weight is None or weight_gradient is None:
            continue
        logit_gradient = log_probs.exp_().sub_(target_probs).div_(count)
        if heads.softcap is not None:
            logit_gradient *= 1 - (logits / heads.softcap).square()
        gradients[part], more = torch.autograd.grad(normed, (entered, weight),
                                                    logit_gradient @ heads.quantized)
        weight_gradient += more
    return Divergence(total / count, gradients, weight_gradient)


def original_states(config: ModelConfig, weights: Weights, tokens: torch.Tensor, spill: Spill,
                    step: Callable[[int], None]) -> Iterator[torch.Tensor]:
    """What the original model's final norm gives, ``[windows, length, hidden]``, some windows at a time.

    Args:
        tokens: int64 ``[windows, length]``.
        spill: keeps hidden states between two layers.
        step: called with each layer's number before it runs.

    Raises:
        NonFiniteError: a hidden state isn't finite.
    """
    batch = max(1, BACKWARD_TOKENS // tokens.shape[1])
    parts = range(-(-tokens.shape[0] // batch))
    positions = torch.arange(tokens.shape[1], device=weights.device)
    with torch.no_grad():
        for i, x in enumerate(embeddings(config, weights, tokens, batch)):
            spill.put(_key(0, i), x)
        for index in range(config.num_layers):
            step(index)
            layer = DecoderLayer(config, index, weights)
            for i in parts:
                x = spill.take(_key(0, i)).to(weights.device)
                y = layer(x, positions.expand(x.shape[:2]), None)
                check_finite_states(y, i * batch, behind(index), index)
                spill.put(_key(0, i), y)
        norm = RMSNorm(NORM, config.hidden_size, config, weights)
        for i in parts:
            yield norm(spill.take(_key(0, i)).to(weights.device)).cpu()


def parts_of(windows: int, length: int) -> Sequence[int]:
    """How many windows each batch of :func:`original_states` has."""
    batch = max(1, BACKWARD_TOKENS // length)
    return [min(batch, windows - first) for first in range(0, windows, batch)]


def _add(gradients: dict[str, torch.Tensor], name: str, more: torch.Tensor) -> None:
    gradients[name] = gradients[name] + more if name in gradients else more


def _key(layer: int, batch: int) -> str:
    return f"{layer}.{batch}"


def _gradient_key(layer: int, batch: int) -> str:
    return f"gradient-{layer}.{batch}"


def scale_of(packed: QuantizedTensor) -> torch.Tensor:
    """The scales of a packed weight, float32 of the spec's ``scale_shape``."""
    form: Format = registry("formats").get(packed.format)
    return form.unpack(packed).scale.float()


def with_scale(packed: QuantizedTensor, scale: torch.Tensor) -> QuantizedTensor:
    """The same codes under other scales, which are rounded to the dtype that the format stores.

    Raises:
        RecipeError: the format doesn't keep the codes.
    """
    form: Format = registry("formats").get(packed.format)
    codes = form.unpack(packed)
    changed = packing.pack(form, dataclasses.replace(codes, scale=scale), packed.dtype)
    if not torch.equal(form.unpack(changed).codes, codes.codes):
        raise RecipeError(f"format {packed.format} can't take other scales for the same codes",
                          why="it packs codes differently under other scales",
                          next="use another format, or leave 'recover' out of the recipe")
    return changed


class ScaledWeight:
    """A packed weight whose scales are ``scale · ratio``.

    Args:
        packed: the packed weight.
        start: its scales, as :func:`scale_of` gives them.
        device: the device on which it is computed.
    """

    def __init__(self, packed: QuantizedTensor, start: torch.Tensor, device: torch.device) -> None:
        form: Format = registry("formats").get(packed.format)
        self._stored = packing.dequantize(form, packed).to(device)
        self._start, self._rotated = start.to(device), packed.spec.rotation is not None

    def weight(self, scale: torch.Tensor) -> torch.Tensor:
        """``[out, in]`` float32 with these scales, not rotated."""
        ratio = torch.where(self._start == 0, torch.ones_like(self._start),
                            scale.to(self._start.device) / self._start)
        stored = self._stored.view(*self._start.shape, -1) * ratio.unsqueeze(-1)
        weight = stored.view(self._stored.shape)
        return undo_hadamard(weight) if self._rotated else weight

    def gradient(self, weight_gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the scales, on the CPU, from that of the weight ``[out, in]``."""
        if self._rotated:
            weight_gradient = apply_hadamard(weight_gradient)
        products = (weight_gradient * self._stored).view(*self._start.shape, -1).sum(-1)
        return torch.where(self._start == 0, torch.zeros_like(products), products / self._start).cpu()
