"""How much each calibration token matters to each Linear: the square of the loss's gradient there.

A layer's outputs don't matter equally: what the model answers depends on few of its tokens, and on those
strongly (the first ones of a text above all, on which attention rests). The divergence that an error
``δ`` in a layer's output causes is ``½ δᵀ F δ`` with ``F`` the Fisher information, the mean square of the
gradient of the log-likelihood of answers drawn from the model itself. Its mean over a Linear's outputs
weighs that token in its Hessian, as in GuidedQuant, https://arxiv.org/abs/2505.07004; Linears that share an
input share a Hessian, in which their weights' mean counts.

At the logits themselves no answer need be drawn: with chances ``p`` the mean over all answers of the squared
gradient is ``1 − Σ p²``. What the head computes for a token matters as far as the model isn't sure of itself.

The model is read twice, a layer at a time: forward, keeping what enters each layer, then backward. What a
layer gives is on disk before the next one is read: a run that was killed goes on at the layer it had reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantkit import __version__
from quantkit.checkpoint.writer import WorkStore
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.layers import RMSNorm
from quantkit.models.linear import Weights
from quantkit.ops.rows import softcapped
from quantkit.quantization.calibration.data import tokens_sha256
from quantkit.quantization.calibration.finite import (
    NonFiniteError,
    behind,
    check_finite_states,
    first_nonfinite,
)
from quantkit.quantization.calibration.runner import embeddings
from quantkit.quantization.memory import BACKWARD_LOGITS, BACKWARD_TOKENS
from quantkit.quantization.recipe import TransformSpec
from quantkit.quantization.transforms.base import resolve_transforms
from quantkit.sources.base import ModelSource
from quantkit.sources.local import sha256_file
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.support.paths import read_regular
from quantkit.support.progress import Phases, ProgressEvent
from quantkit_kernels.kept import cache_folder

MOST = 20.0
"""Times the mean, to which what a token matters is cut: the gradient of one sampled answer is noisy."""
NEVER = -1.0
"""Stands for the square of a gradient where a token didn't reach an expert."""


WALKS = "walks"
"""What a run calls the work of :func:`token_gradients`."""
FORWARD = "weighing tokens forward"
BACKWARD = "weighing tokens backward"
"""The phases of a run in which that is done."""
WEIGHING = "what each token matters"
HIDDEN = "hidden.{}"
"""What enters a layer. The head counts as one behind the last layer."""
SLOPES = "slopes.{}"
"""The gradients there."""
SQUARES = "squares.{}"
"""The squared gradients at the outputs of a layer's Linears. They are stored after slopes, and so they say
that a layer is done."""


@torch.inference_mode(False)
def token_gradients(config: ModelConfig, weights: Weights, tokens: torch.Tensor, wanted: Collection[str],
                    seed: int, store: WorkStore,
                    step: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """How strongly the model's answers depend on every token's outputs, for every Linear that is wanted.

    Args:
        weights: the original model's; computing happens in its dtype and on its device.
        tokens: int64 ``[windows, tokens]``.
        wanted: full names of Linears of the decoder layers, and of the head (that of the embedding, where the
            embedding is the head).
        seed: the seed of the answers that are drawn.
        store: keeps finished layers, which are found if an earlier attempt with the same arguments was
            stopped. The caller clears it once the result is kept elsewhere.
        step: called after each layer, twice: forward and backward; and after the head, between the two.

    Returns:
        By full name, float32 ``[windows · tokens]`` on the CPU: the squared gradient of the log-likelihood
        of all answers in the token's window, a mean over the Linear's outputs; :data:`NEVER` for tokens
        that didn't reach it (an expert is reached by some).

    Raises:
        NonFiniteError: a hidden state or a gradient isn't finite; sample, layer and tensor are named.
        CalibrationError: all gradients are 0.
        CheckpointError: a layer can't be stored.
    """
    walks = _Walks(config, weights, tokens, store)
    layers = config.num_layers
    inside = [name for name in wanted if name not in (EMBEDDING, HEAD)]
    behind = [name for name in wanted if name in (EMBEDDING, HEAD)]
    reached = walks.reached(bool(inside))
    for index in range(-1, layers):
        if index + 1 < reached and not store.has(HIDDEN.format(index + 1)):
            walks.forward(index)
        if index >= 0:
            step()
    if reached > layers:
        walks.head(seed, bool(behind))
    step()
    squares = store.get(SQUARES.format(layers))["head"]
    result = dict.fromkeys(behind, squares)
    for index in reversed(range(layers)) if inside else ():
        if index < reached:
            walks.backward(index, inside)
        result |= store.get(SQUARES.format(index))
        step()
    if inside and not any(bool((result[name] > 0).any()) for name in inside):
        raise CalibrationError("the model's answers depend on none of its layers",
                               why="every gradient is 0", next="calibration: {importance: equal}")
    return result


class _Walks:
    """One layer at a time, forward and backward; each method stores what the next one needs."""

    def __init__(self, config: ModelConfig, weights: Weights, tokens: torch.Tensor,
                 store: WorkStore) -> None:
        self._config, self._weights = config, weights
        self._tokens, self._store = tokens, store
        samples, length = tokens.shape
        self._batch = max(1, BACKWARD_TOKENS // length)
        sizes = [min(self._batch, samples - first) for first in range(0, samples, self._batch)]
        self._shapes = [(size, length, config.hidden_size) for size in sizes]
        self._positions = torch.arange(length, device=weights.device).expand(sizes[0], length)

    def reached(self, inside: bool) -> int:
        """The layer down to which an earlier attempt has come backward; one more than the head's if it hasn't
        come to the head, or if anything that it left is damaged.

        Args:
            inside: the walk goes on below the head.
        """
        behind = self._config.num_layers + 1
        at = behind
        while at and self._store.has(SQUARES.format(at - 1)):
            at -= 1
        return at if at in (0, behind) or not inside or self._store.has(SLOPES.format(at)) else behind

    @torch.no_grad()
    def forward(self, index: int) -> None:
        """Through a layer; −1 is the embedding."""
        if index < 0:
            self._put(HIDDEN, 0, embeddings(self._config, self._weights, self._tokens, self._batch))
            return
        layer = DecoderLayer(self._config, index, self._weights)
        self._put(HIDDEN, index + 1, (_forward(layer, index, x, self._positions, i * self._batch)
                                      for i, x in enumerate(self._states(index))))

    @torch.no_grad()
    def head(self, seed: int, wanted: bool) -> None:
        """Compute, from the last layer's output, the gradients there of minus the log-likelihood of an answer
        drawn for each token; and behind the head, if that is wanted, its square, float32 ``[tokens]``, a mean
        over logits and over all answers."""
        layers = self._config.num_layers
        squares: list[torch.Tensor] | None = [] if wanted else None
        self._put(SLOPES, layers, _head(self._config, self._weights, self._states(layers), squares, seed))
        self._store.put(SQUARES.format(layers), {"head": torch.cat(squares or [torch.empty(0)])})
        self._store.drop(HIDDEN.format(layers))

    def backward(self, index: int, wanted: Collection[str]) -> None:
        """Through a layer: each wanted Linear's squared gradients, float32 ``[tokens]``."""
        layer = DecoderLayer(self._config, index, self._weights)
        squares = {name: torch.full((self._tokens.numel(),), NEVER)
                   for name in layer.linears() if name in wanted}
        self._put(SLOPES, index, self._slopes(layer, index, squares))
        for name, squares_of_layer in squares.items():
            if not bool(torch.isfinite(squares_of_layer.sum())):
                worst = int(torch.nan_to_num(squares_of_layer, nan=torch.inf).argmax())
                raise NonFiniteError(f"the gradient at the output of {name} is NaN or infinite", layer=index,
                                     sample=worst // self._tokens.shape[1],
                                     why="calibration: {importance: equal} needs none")
        self._store.put(SQUARES.format(index), squares)
        self._store.drop(SLOPES.format(index + 1))
        self._store.drop(HIDDEN.format(index))

    def _slopes(self, layer: DecoderLayer, index: int,
                squares: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        first = 0
        for i, x in enumerate(self._states(index)):
            for name, squares_of_layer in squares.items():
                layer.linears()[name].on_output = _watch(squares_of_layer, first)
            with torch.enable_grad():
                x.requires_grad_(True)
                y = layer(x, self._positions[:x.shape[0]], None)
            slope = self._store.batch(SLOPES.format(index + 1), i).to(x.device)
            first += x.shape[0] * x.shape[1]
            yield torch.autograd.grad(y, x, slope)[0]

    def _states(self, index: int) -> Iterator[torch.Tensor]:
        """What enters a layer, a batch at a time."""
        for i in range(len(self._shapes)):
            yield self._store.batch(HIDDEN.format(index), i).to(self._weights.device)

    def _put(self, kind: str, index: int, batches: Iterable[torch.Tensor]) -> None:
        self._store.put_batches(kind.format(index), self._shapes, self._weights.dtype, batches)


def _forward(layer: DecoderLayer, index: int, x: torch.Tensor, positions: torch.Tensor,
             first: int) -> torch.Tensor:
    y = layer(x, positions[:x.shape[0]], None)
    try:
        check_finite_states(y, first, behind(index), index)
    except NonFiniteError as error:
        raise first_nonfinite(lambda place: layer(x[place:place + 1], positions[:1], None), layer.linears(),
                              len(x), first, index) or error from None
    return y


def _head(config: ModelConfig, weights: Weights, states: Iterable[torch.Tensor],
          squares: list[torch.Tensor] | None, seed: int) -> Iterator[torch.Tensor]:
    """The gradient at each batch of states; what is behind the head is added to ``squares``, if given."""
    norm = RMSNorm("model.norm", config.hidden_size, config, weights)
    head = weights.tensor(f"{EMBEDDING if config.tie_word_embeddings else HEAD}.weight")
    random = torch.Generator(head.device).manual_seed(seed % 2**63)
    count, sample = -(-BACKWARD_LOGITS // head.shape[0]), 0
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
            odd = (~torch.isfinite(chances[:, 0])).nonzero()  # a softmax is finite everywhere or nowhere
            if odd.numel():
                raise NonFiniteError("the model's output is NaN or infinite",
                                     sample=sample + (start + int(odd[0])) // x.shape[1])
            drawn = draw_answers(chances, random)
            # its slope
            slant = None if config.logit_softcap is None else 1 - (logits / config.logit_softcap).square()
            if squares is not None:
                spread = chances - chances.square()
                squares.append((spread if slant is None else spread * slant.square()).mean(-1).cpu())
            chances.scatter_add_(1, drawn, -torch.ones_like(chances[:, :1]))
            if slant is not None:
                chances *= slant
            (out[part],) = torch.autograd.grad(normed, entered, chances.to(head.dtype) @ head)
        sample += x.shape[0]
        yield slope


def draw_answers(chances: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A token of each row of ``chances [n, vocab]``, int64 ``[n, 1]``: ``torch.multinomial`` draws a random
    number for each token of the vocabulary, which takes longer than the head."""
    cumulative = chances.cumsum(dim=-1)
    uniform = torch.rand(len(chances), 1, generator=random, device=chances.device)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return drawn.clamp_(max=chances.shape[1] - 1)


def _watch(squares: torch.Tensor, first: int) -> Callable[..., None]:
    """Puts the squares of a pass's slopes where its tokens are; ``first``: the pass's first."""
    def watch(y: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        def take(slope: torch.Tensor) -> None:
            squared = slope.detach().float().square().mean(-1).flatten().cpu()
            at = torch.arange(len(squared)) if tokens is None else tokens.cpu()
            squares[first + at] = squared

        y.register_hook(take)

    return watch


def weighing_steps(phases: Phases, layers: int, backward: bool = True) -> Callable[[], None]:
    """Report that tokens begin to be weighed. Returns what is called after each layer, forward and, if the
    walk goes ``backward``, back; a layer takes longer backward than forward."""
    count = itertools.count()

    def step() -> None:
        done = next(count)
        if done < layers:
            phases(FORWARD)(ProgressEvent(done, layers, WEIGHING, detail=f"layer {done + 1} of {layers}"))
        elif not backward:
            phases(FORWARD)(ProgressEvent(layers, layers, WEIGHING))
        elif done == layers:  # no layer: its time says nothing about theirs
            phases(BACKWARD)(ProgressEvent(0, layers, WEIGHING, kept=True, detail="the head"))
        else:
            behind = done - layers - 1
            detail = f"layer {layers - behind} of {layers}" if behind < layers else ""
            phases(BACKWARD)(ProgressEvent(behind, layers, WEIGHING, detail=detail))

    step()
    return step


def weighed_windows(samples: int, count: int) -> list[int]:
    """The numbers of ``count`` of the windows, evenly spread; all if they are no more."""
    if count >= samples:
        return list(range(samples))
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def spread(squares: torch.Tensor, windows: Sequence[int], samples: int) -> torch.Tensor:
    """Importance of all tokens from the squares of some windows, as :func:`balanced` makes it of all.

    Elsewhere a token counts for what those that reached the Linear do on average at its place. Places 0, 1, 2
    and 3, 4 to 7, … are taken together: attention rests on a text's first tokens.

    Args:
        squares: the squares that :func:`token_gradients` found of a Linear, float32 ``[windows · length]``.
        windows: the numbers of those windows.
        samples: the number of all windows.

    Returns:
        float32 ``[windows · tokens]``, 1 on average.
    """
    if len(windows) == samples:
        return balanced(squares)
    known = balanced(squares).view(len(windows), -1)
    reached = (squares != NEVER).view(known.shape)
    length = known.shape[1]
    everywhere = torch.ones(samples, length)
    start, stop = 0, 1
    while start < length:
        there = known[:, start:stop][reached[:, start:stop]]
        if there.numel():
            everywhere[:, start:stop] = there.mean()
        start, stop = stop, 2 * stop
    everywhere[list(windows)] = torch.where(reached, known, everywhere[list(windows)])
    return (everywhere / everywhere.mean()).flatten()


def balanced(squares: torch.Tensor) -> torch.Tensor:
    """What :func:`token_gradients` found of a Linear, 1 on average over the tokens that reached it; the
    largest are cut to :data:`MOST` times the mean before. Another token, which quantized layers may send
    to this expert, counts 1."""
    reached = squares != NEVER
    reached_squares = squares[reached]
    weights = torch.ones_like(squares)
    if reached_squares.numel() and float(mean := reached_squares.mean()) > 0:
        limited = (reached_squares / mean).clamp(max=MOST)
        weights[reached] = limited / limited.mean()
    return weights


# -- kept in the user's cache folder by model and text: the walks depend neither on the bits nor on the method

DRAWS = 3
"""Number of the way in which answers are drawn."""
LEAST_GRADIENTS = 1 << 16
"""Numbers: fewer are found again as quickly as they are looked for."""
GRADIENT_FILES = 8
"""Files that are kept, the newest; one takes 4 bytes for each token and Linear."""
HASH = ".sha256"
PART = ".part"
DAY = 24 * 60 * 60
Gradients = dict[str, torch.Tensor]


def gradients(source: ModelSource, transforms: Sequence[TransformSpec], tokens: torch.Tensor, seed: int,
              wanted: Sequence[str], device: torch.device, find: Callable[[], Gradients]) -> Gradients:
    """What ``find`` gives, as ``token_gradients`` does; from an earlier run if there was one.

    Args:
        source: reads the model in its changed form.
        transforms: the transforms that changed it.
        tokens: int64 ``[windows, tokens]``.
        seed: the seed of the answers that are drawn.
        wanted: full names of Linears.
        device: the device on which ``find`` computes: sums are made in another order on another.
        find: walks through the model.
    """
    identity = source.identity()
    folder = cache_folder()
    known = identity.pinned or identity.files
    if folder is None or not known or tokens.numel() * len(wanted) < LEAST_GRADIENTS:
        return find()
    key = {"quantkit": __version__, "draws": DRAWS, "torch": torch.__version__, "seed": seed,
           "device": device.type,
           "tokens": [tokens_sha256(tokens), list(tokens.shape)],
           "source": [identity.kind, "" if identity.files else identity.uri, identity.revision,
                      dict(identity.files)], "wanted": sorted(wanted),
           "transforms": [spec.model_dump(mode="json") for spec, (transform, _) in zip(
               transforms, resolve_transforms(transforms), strict=True) if transform.layer is None]}
    file = folder.with_name("gradients") / f"{_digest(key)}.safetensors"
    gradients = _read(file, wanted)
    if gradients is None:
        gradients = find()
        with contextlib.suppress(OSError, SafetensorError, SourceError):  # what can't be kept is found again
            _write(file, gradients)
    return gradients


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path, wanted: Sequence[str]) -> Gradients | None:
    """``None`` unless the file is as it was written, by its own hash: a damaged one would change results."""
    try:
        if sha256_file(file) != read_regular(file.with_suffix(HASH), 64).decode():
            return None
        tensors = load_file(file)
        return {name: tensors[name] for name in wanted}
    except (OSError, ValueError, KeyError, SafetensorError, SourceError):
        return None


def _write(file: Path, gradients: Gradients) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, suffix=PART) as folder:
        part = Path(folder) / file.name
        save_file({name: tensor.contiguous().clone() for name, tensor in gradients.items()}, part)
        part.with_suffix(HASH).write_text(sha256_file(part), encoding="ascii")
        for path in (part, part.with_suffix(HASH)):
            path.replace(file.parent / path.name)
    others = sorted(file.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[GRADIENT_FILES:]:
        path.unlink(missing_ok=True)
        path.with_suffix(HASH).unlink(missing_ok=True)
    for partial in file.parent.glob(f"*{PART}"):  # of a run that was killed
        if time.time() - partial.stat().st_mtime > DAY:
            shutil.rmtree(partial, ignore_errors=True)
