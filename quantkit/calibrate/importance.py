"""How much each calibration token matters to each Linear: the square of the loss's gradient there.

A layer's outputs don't matter equally: what the model answers depends on few of its tokens, and on those
strongly (the first ones of a text above all, on which attention rests). The divergence that an error
``δ`` in a layer's output causes is ``½ δᵀ F δ`` with ``F`` the Fisher information, the mean square of the
gradient of the log-likelihood of answers drawn from the model itself. Its mean over a Linear's outputs
weighs that token in the layer's Hessian, as in GuidedQuant, https://arxiv.org/abs/2505.07004.

The model is read twice, a layer at a time: forward, keeping what enters each layer, then backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from quantkit.calibrate.finite import NonFiniteError, first_nonfinite, require_finite_states
from quantkit.calibrate.runner import EMBEDDING
from quantkit.calibrate.spill import Spill
from quantkit.errors import CalibrationError
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import RMSNorm, embedded
from quantkit.models.linear import Weights
from quantkit.ops.activation import softcapped
from quantkit.peak import BACKWARD_LOGITS, BACKWARD_TOKENS

MOST = 20.0
"""Times the mean, to which what a token matters is cut: the gradient of one sampled answer is noisy."""
NEVER = -1.0
"""Stands for the square of a gradient where a token didn't reach an expert."""


@torch.inference_mode(False)
def token_importance(config: ModelConfig, weights: Weights, tokens: torch.Tensor, wanted: Collection[str],
                     seed: int, folder: Path,
                     step: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """A weight on every token, for every Linear that wants one.

    Args:
        config: the model's.
        weights: the original model's; computing happens in its dtype and on its device.
        tokens: int64 ``[samples, length]``.
        wanted: full names of Linears of the decoder layers.
        seed: of the answers that are drawn.
        folder: where hidden states go that memory has no room for; removed when done.
        step: called after each layer, twice: forward and backward.

    Returns:
        By full name, float32 ``[samples · length]`` on the CPU, 1 on average over the tokens that reach
        the Linear (an expert is reached by some); 1 everywhere for one on which no answer depends (what
        follows it may be 0).

    Raises:
        NonFiniteError: a hidden state or a gradient isn't finite; sample, layer and tensor are named.
        CalibrationError: all gradients are 0.
        QuantkitError: hidden states can't be written to ``folder``.
    """
    samples, length = tokens.shape
    batch = max(1, BACKWARD_TOKENS // length)
    parts = list(tokens.split(batch))
    positions = torch.arange(length, device=weights.device).expand(min(batch, samples), length)
    with Spill(folder) as states:
        with torch.no_grad():
            table = weights.tensor(EMBEDDING)
            now = [embedded(config, part.to(weights.device), table) for part in parts]
            del table
            for i, x in enumerate(now):
                require_finite_states(x, i * batch, "the embedding")
            for index in range(config.num_layers):
                layer = DecoderLayer(config, index, weights)
                for i, x in enumerate(now):
                    states.put(f"{index}.{i}", x)
                    now[i] = _forward(layer, index, x, positions, i * batch)
                del layer  # before the next one is read
                step()
            slopes = _head(config, weights, now, seed)
        del now
        found: dict[str, torch.Tensor] = {}
        for index in reversed(range(config.num_layers)):
            layer = DecoderLayer(config, index, weights)
            found |= _backward(layer, index, wanted, slopes, states, positions)
            del layer
            step()
    if wanted and all(bool((one == 1).all()) for one in found.values()):
        raise CalibrationError("the model's answers depend on none of its layers",
                               why="every gradient is 0", next="calibration: {importance: equal}")
    return found


def _forward(layer: DecoderLayer, index: int, x: torch.Tensor, positions: torch.Tensor,
             first: int) -> torch.Tensor:
    y = layer(x, positions[:x.shape[0]], None)
    try:
        require_finite_states(y, first, f"model.layers.{index}", index)
    except NonFiniteError as error:
        raise first_nonfinite(lambda one: layer(one, positions[:1], None), layer.linears(), x, first,
                              index) or error from None
    return y


def _head(config: ModelConfig, weights: Weights, states: Sequence[torch.Tensor],
          seed: int) -> list[torch.Tensor]:
    """At the last layer's end: the gradient of minus the log-likelihood of an answer drawn for each token."""
    norm = RMSNorm("model.norm", config.hidden_size, config, weights)
    head = weights.tensor(EMBEDDING if config.tie_word_embeddings else "lm_head.weight")
    random = torch.Generator(head.device).manual_seed(seed % 2**63)
    slopes, count, sample = [], max(1, BACKWARD_LOGITS // head.shape[0]), 0
    for x in states:
        slope = torch.empty_like(x)
        flat, out = x.flatten(0, 1), slope.flatten(0, 1)
        for start in range(0, flat.shape[0], count):
            part = slice(start, start + count)
            with torch.enable_grad():
                entered = flat[part].detach().requires_grad_(True)
                normed = norm(entered)
            logits = softcapped((normed.detach() @ head.T).float(), config.logit_softcap)
            chances = F.softmax(logits, dim=-1)
            odd = (~torch.isfinite(chances)).any(dim=-1).nonzero()
            if odd.numel():
                raise NonFiniteError("the model's output is NaN or infinite",
                                     sample=sample + (start + int(odd[0])) // x.shape[1])
            drawn = torch.multinomial(chances, 1, generator=random)
            chances.scatter_add_(1, drawn, -torch.ones_like(chances[:, :1]))
            if config.logit_softcap is not None:  # its slope
                chances *= 1 - (logits / config.logit_softcap).square()
            (out[part],) = torch.autograd.grad(normed, entered, chances.to(head.dtype) @ head)
        slopes.append(slope)
        sample += x.shape[0]
    return slopes


def _backward(layer: DecoderLayer, index: int, wanted: Collection[str], slopes: list[torch.Tensor],
              states: Spill, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each Linear's importance; ``slopes`` go from the layer's end to its beginning."""
    squares: dict[str, torch.Tensor] = {}
    count, first = sum(slope.shape[0] * slope.shape[1] for slope in slopes), 0
    watched = {name: one for name, one in layer.linears().items() if name in wanted}
    for name in watched:
        squares[name] = torch.full((count,), NEVER)
    for i, slope in enumerate(slopes):
        for name, linear in watched.items():
            linear.on_output = _watch(squares[name], first)
        with torch.enable_grad():
            x = states.take(f"{index}.{i}").to(slope.device).requires_grad_(True)
            y = layer(x, positions[:x.shape[0]], None)
        (slopes[i],) = torch.autograd.grad(y, x, slope)
        first += slope.shape[0] * slope.shape[1]
    length = positions.shape[1]
    return {name: _balanced(name, index, found, length) for name, found in squares.items()}


def _watch(squares: torch.Tensor, first: int) -> Callable[..., None]:
    """Puts the squares of a pass's slopes where its tokens are; ``first``: the pass's first."""
    def watch(y: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        def take(slope: torch.Tensor) -> None:
            found = slope.detach().float().square().mean(-1).flatten().cpu()
            at = torch.arange(len(found)) if tokens is None else tokens.cpu()
            squares[first + at] = found

        y.register_hook(take)

    return watch


def _balanced(name: str, layer: int, squares: torch.Tensor, length: int) -> torch.Tensor:
    """1 on average over the tokens that reached the Linear; the largest are cut to :data:`MOST` times the
    mean before. Another token, which quantized layers may send to this expert, counts 1."""
    reached = squares != NEVER
    found = squares[reached]
    mean = found.mean() if found.numel() else torch.tensor(0.0)
    if not bool(torch.isfinite(mean)):
        worst = int(torch.nan_to_num(squares, nan=torch.inf).argmax())
        raise NonFiniteError(f"the gradient at the output of {name} is NaN or infinite", layer=layer,
                             sample=worst // length, why="calibration: {importance: equal} needs none")
    weights = torch.ones_like(squares)
    if float(mean) > 0:
        limited = (found / mean).clamp(max=MOST)
        weights[reached] = limited / limited.mean()
    return weights
