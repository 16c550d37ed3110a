"""How much each calibration token matters to each Linear: the square of the loss's gradient there.

A layer's outputs don't matter equally: what the model answers depends on few of its tokens, and on those
strongly (the first ones of a text above all, on which attention rests). The divergence that an error
``δ`` in a layer's output causes is ``½ δᵀ F δ`` with ``F`` the Fisher information, the mean square of the
gradient of the log-likelihood of answers drawn from the model itself. Its mean over a Linear's outputs
weighs that token in the layer's Hessian, as in GuidedQuant, https://arxiv.org/abs/2505.07004.

At the logits themselves no answer need be drawn: with chances ``p`` the mean over all answers of the squared
gradient is ``1 − Σ p²``. What the head computes for a token matters as far as the model isn't sure of itself.

The model is read twice, a layer at a time: forward, keeping what enters each layer, then backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.nn.functional as F

from quantkit.calibrate.finite import NonFiniteError, first_nonfinite, require_finite_states
from quantkit.calibrate.runner import embeddings
from quantkit.calibrate.spill import Spill
from quantkit.errors import CalibrationError
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import RMSNorm
from quantkit.models.linear import Weights
from quantkit.ops.activation import softcapped
from quantkit.peak import BACKWARD_LOGITS, BACKWARD_TOKENS

MOST = 20.0
"""Times the mean, to which what a token matters is cut: the gradient of one sampled answer is noisy."""
NEVER = -1.0
"""Stands for the square of a gradient where a token didn't reach an expert."""


@torch.inference_mode(False)
def token_gradients(config: ModelConfig, weights: Weights, tokens: torch.Tensor, wanted: Collection[str],
                    seed: int, folder: Path,
                    step: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """How strongly the model's answers depend on every token's outputs, for every Linear that is wanted.

    Args:
        config: the model's.
        weights: the original model's; computing happens in its dtype and on its device.
        tokens: int64 ``[samples, length]``.
        wanted: full names of Linears of the decoder layers, and of the head (that of the embedding, where the
            embedding is the head).
        seed: of the answers that are drawn.
        folder: where hidden states go that memory has no room for; removed when done.
        step: called after each layer, twice: forward and backward.

    Returns:
        By full name, float32 ``[samples · length]`` on the CPU: the squared gradient of the log-likelihood
        of all answers in the token's window, a mean over the Linear's outputs; :data:`NEVER` for tokens
        that didn't reach it (an expert is reached by some).

    Raises:
        NonFiniteError: a hidden state or a gradient isn't finite; sample, layer and tensor are named.
        CalibrationError: all gradients are 0.
        QuantkitError: hidden states can't be written to ``folder``.
    """
    samples, length = tokens.shape
    batch = max(1, BACKWARD_TOKENS // length)
    batches = -(-samples // batch)
    positions = torch.arange(length, device=weights.device).expand(min(batch, samples), length)
    inside = [name for name in wanted if name not in (EMBEDDING, HEAD)]
    with Spill(folder) as states:
        with torch.no_grad():
            for i, x in enumerate(embeddings(config, weights, tokens, batch)):
                states.put(f"0.{i}", x)
            for index in range(config.num_layers):
                layer = DecoderLayer(config, index, weights)
                for i in range(batches):
                    x = (states.get if inside else states.take)(f"{index}.{i}").to(weights.device)
                    states.put(f"{index + 1}.{i}", _forward(layer, index, x, positions, i * batch))
                del layer, x  # before the next one is read
                step()
            squares = _head(config, weights, states, batches, seed)
        found = {name: squares for name in wanted if name in (EMBEDDING, HEAD)}
        for index in reversed(range(config.num_layers)) if inside else ():
            layer = DecoderLayer(config, index, weights)
            found |= _backward(layer, index, wanted, states, tokens.numel(), batches, positions)
            del layer
            step()
    if inside and not any(bool((found[name] > 0).any()) for name in inside):
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


def _head(config: ModelConfig, weights: Weights, states: Spill, batches: int, seed: int) -> torch.Tensor:
    """In place of what the last layer leaves: there, the gradient of minus the log-likelihood of an answer
    drawn for each token. Behind the head: its square, float32 ``[tokens]``, a mean over logits and over all
    answers."""
    norm = RMSNorm("model.norm", config.hidden_size, config, weights)
    head = weights.tensor(f"{EMBEDDING if config.tie_word_embeddings else HEAD}.weight")
    random = torch.Generator(head.device).manual_seed(seed % 2**63)
    count, sample = -(-BACKWARD_LOGITS // head.shape[0]), 0
    squares = []
    for i in range(batches):
        x = states.take(f"{config.num_layers}.{i}").to(head.device)
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
            spread = chances - chances.square()
            chances.scatter_add_(1, drawn, -torch.ones_like(chances[:, :1]))
            if config.logit_softcap is not None:  # its slope
                slant = 1 - (logits / config.logit_softcap).square()
                chances *= slant
                spread *= slant.square()
            squares.append(spread.mean(-1).cpu())
            (out[part],) = torch.autograd.grad(normed, entered, chances.to(head.dtype) @ head)
        states.put(f"{config.num_layers}.{i}", slope)
        sample += x.shape[0]
    return torch.cat(squares)


def _backward(layer: DecoderLayer, index: int, wanted: Collection[str], states: Spill, count: int,
              batches: int, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each Linear's importance for ``count`` tokens; gradients are taken at the layer's end and left at its
    beginning."""
    squares: dict[str, torch.Tensor] = {}
    first = 0
    watched = {name: one for name, one in layer.linears().items() if name in wanted}
    for name in watched:
        squares[name] = torch.full((count,), NEVER)
    for i in range(batches):
        for name, linear in watched.items():
            linear.on_output = _watch(squares[name], first)
        with torch.enable_grad():
            x = states.take(f"{index}.{i}").to(positions.device).requires_grad_(True)
            y = layer(x, positions[:x.shape[0]], None)
        slope = states.take(f"{index + 1}.{i}").to(positions.device)
        states.put(f"{index}.{i}", torch.autograd.grad(y, x, slope)[0])
        first += x.shape[0] * x.shape[1]
    for name, found in squares.items():
        if not bool(torch.isfinite(found.sum())):
            worst = int(torch.nan_to_num(found, nan=torch.inf).argmax())
            raise NonFiniteError(f"the gradient at the output of {name} is NaN or infinite", layer=index,
                                 sample=worst // positions.shape[1],
                                 why="calibration: {importance: equal} needs none")
    return squares


def _watch(squares: torch.Tensor, first: int) -> Callable[..., None]:
    """Puts the squares of a pass's slopes where its tokens are; ``first``: the pass's first."""
    def watch(y: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        def take(slope: torch.Tensor) -> None:
            found = slope.detach().float().square().mean(-1).flatten().cpu()
            at = torch.arange(len(found)) if tokens is None else tokens.cpu()
            squares[first + at] = found

        y.register_hook(take)

    return watch


def balanced(squares: torch.Tensor) -> torch.Tensor:
    """What :func:`token_gradients` found of a Linear, 1 on average over the tokens that reached it; the
    largest are cut to :data:`MOST` times the mean before. Another token, which quantized layers may send
    to this expert, counts 1."""
    reached = squares != NEVER
    found = squares[reached]
    weights = torch.ones_like(squares)
    if found.numel() and float(mean := found.mean()) > 0:
        limited = (found / mean).clamp(max=MOST)
        weights[reached] = limited / limited.mean()
    return weights
