"""Pushes calibration tokens through a model, one decoder layer at a time.

Each layer sees what the *quantized* layers before it produce, so that it can answer for their
errors, as in GPTQ, https://arxiv.org/abs/2210.17323. In memory are one layer and the hidden states; these
are on disk where memory has no room for them.

A layer is quantized in stages: Linears that see the same input, then what follows them. A stage's Linears are
solved before the next stage is measured, so that what the next one sees has passed through them as they are
stored; and the layer is run once, where measuring all of it before any is solved takes two runs. Experts are
one stage: which of them see a token is known only while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.finite import all_finite
from quantkit.models.architecture import EMBEDDING, EXPERT, linear_slots
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.forward_context import ForwardContext
from quantkit.models.layers import MixtureOfExperts, RMSNorm, embedded
from quantkit.models.linear import Linear, Weights
from quantkit.ops.hadamard import undo_hadamard
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.reference import native_bf16, rounded_products
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight, RoundedWeight, StoredWeight
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.finite import (
    NEXT,
    NonFiniteError,
    behind,
    check_finite_input,
    check_finite_states,
    first_nonfinite,
)
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.memory import BATCH_TOKENS
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.hessian import symmetric_
from quantkit.sources.base import ModelSource, tensor_alone
from quantkit.support.errors import CalibrationError

States = tuple[torch.Tensor, ...]
"""Between two stages: hidden states ``[B, T, hidden]`` and, within attention or MLP, what its last Linear
multiplies, ``[B, T, in]``."""


def original_weights(source: ModelSource, device: torch.device | str = "cpu") -> Weights:
    """The original model's in float32. On a CPU that multiplies in bfloat16 Linears do so: what that rounds
    away is far below what quantizing does."""
    half = torch.device(device).type == "cpu" and native_bf16()
    return Weights(partial(tensor_alone, source), source.tensors().__contains__, torch.float32, device=device,
                   pack=_rounded if half else None)


def _rounded(weight: StoredWeight) -> LinearWeight:
    return RoundedWeight(weight.tensor) if isinstance(weight, PlainWeight) else weight


class SomeStage(Protocol):
    """Linears, by full name, that are measured, solved and run together; ``last``: in their layer."""

    @property
    def linears(self) -> Collection[str]: ...
    @property
    def last(self) -> bool: ...


StageT = TypeVar("StageT", bound=SomeStage)


class CalibrationRunner(Protocol[StageT]):
    """What pushes calibration tokens through a model; :class:`LayerRunner` says what its methods do."""

    next: int

    def stages(self, index: int) -> list[StageT]: ...
    def measure_stage(self, stage: StageT,
                      wanted: Mapping[str, Collection[str]]) -> dict[str, LayerStats]: ...
    def forget(self, names: Collection[str]) -> None: ...
    def advance_stage(self, stage: StageT, replaced: Mapping[str, QuantizedTensor]) -> None: ...


@dataclass(frozen=True)
class Stage:
    """Linears of a decoder layer that are measured, solved and run together.

    Attributes:
        result: names what it computes, for messages.
        linears: the Linears by full name.
        run: computes the states behind it from ``(states, positions int64 [B, T])``.
        inputs: computes what enters every one of the Linears from the states before it; ``None`` where that
            is known only while it runs.
        last: whether it is the layer's last stage.
    """

    index: int
    result: str
    linears: Mapping[str, Linear]
    run: Callable[[States, torch.Tensor], States]
    inputs: Callable[[States], torch.Tensor] | None = None
    last: bool = False


def stages(config: ModelConfig, index: int, layer: DecoderLayer) -> list[Stage]:
    """Those of a layer, in order."""
    attention, mlp = layer.self_attn, layer.mlp

    def attend(states: States, positions: torch.Tensor) -> States:
        context = ForwardContext(config, positions, states[0].dtype)
        return states[0], attention.attend(layer.before_attention(states[0]), context, None)

    def add_attention(states: States, positions: torch.Tensor) -> States:
        return (layer.add_attention(states[0], attention.o_proj(states[1])),)

    first = [Stage(index, f"the input of {attention.o_proj.name}", _by_name(attention.inputs), attend,
                   lambda states: layer.before_attention(states[0])),
             Stage(index, f"the hidden state after model.layers.{index}.self_attn",
                   _by_name([attention.o_proj]), add_attention, lambda states: states[1])]
    if isinstance(mlp, MixtureOfExperts):
        def route(states: States, positions: torch.Tensor) -> States:
            return (layer.add_mlp(states[0], mlp(layer.before_mlp(states[0]))),)

        return [*first, Stage(index, behind(index), _by_name(mlp.linears()), route, last=True)]

    def activate(states: States, positions: torch.Tensor) -> States:
        return states[0], mlp.activate(layer.before_mlp(states[0]))

    def add_mlp(states: States, positions: torch.Tensor) -> States:
        return (layer.add_mlp(states[0], mlp.down_proj(states[1])),)

    return [*first, Stage(index, f"the input of {mlp.down_proj.name}", _by_name(mlp.inputs), activate,
                          lambda states: layer.before_mlp(states[0])),
            Stage(index, behind(index), _by_name([mlp.down_proj]), add_mlp, lambda states: states[1],
                  last=True)]


def whole(index: int, layer: DecoderLayer) -> Stage:
    """A layer as a single stage: for transforms, which change it once all of it was measured."""
    def run(states: States, positions: torch.Tensor) -> States:
        return (layer(states[0], positions, None),)

    return Stage(index, behind(index), layer.linears(), run, last=True)


def _by_name(linears: list[Linear]) -> dict[str, Linear]:
    return {linear.name: linear for linear in linears}


class LayerRunner:
    """Hidden states between two layers, and the layer being worked on.

    For every layer in order, and every one of its :meth:`stages`: :meth:`measure_stage` (or not, if nothing
    needs it), then :meth:`advance_stage`. :meth:`measure` and :meth:`advance` take a layer as one stage.

    Args:
        weights: the *original* model's; computing happens in its dtype and on its device.
        tokens: int64 ``[windows, tokens]``.
        importance: the importance of each token for each Linear, float32 ``[windows · tokens]`` by full name;
            ``None``: all tokens count the same.
        states: keeps the hidden states; in memory by default.
        table: the embedding, if it is quantized already.
        correlation: factor on Hessians beside their diagonals; below 1 where tokens are no text.
        drift: the original model's states are kept too, so that it can be measured how far a stage's inputs
            have come away from them.

    Attributes:
        next: index of the layer that the hidden states are the input of, or are within.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokens: torch.Tensor,
                 importance: Mapping[str, torch.Tensor] | None = None, states: Spill | None = None,
                 table: QuantizedTensor | None = None, correlation: float = 1.0, drift: bool = False) -> None:
        self._config, self._weights = config, weights
        self._importance, self._correlation = importance, correlation
        self._shares = {slot.name: slot.shares for slot in linear_slots(config)}
        self._layer: DecoderLayer | None = None
        self.next = 0
        samples, length = tokens.shape
        self._batch = max(1, BATCH_TOKENS // length)
        batches = -(-samples // self._batch)
        positions = torch.arange(length, device=weights.device)
        self._positions = positions.expand(min(self._batch, samples), length)
        spill = states or Spill(None)
        self._states = StatesOfBatches(spill, "", batches, weights.device)
        for i, x in enumerate(embeddings(config, weights, tokens, self._batch, table)):
            self._states.put(i, (x,))
        self._original: StatesOfBatches | None = None
        self._ahead = False  # the original states are behind the stage that is next
        if drift:
            self._original = StatesOfBatches(spill, "original-", batches, weights.device)
            for i, x in enumerate(embeddings(config, weights, tokens, self._batch)):
                self._original.put(i, (x,))

    def stages(self, index: int) -> list[Stage]:
        """Those of layer ``index``, which must be :attr:`next`."""
        return stages(self._config, index, self._current(index))

    def measure(self, index: int,
                wanted: Mapping[str, Collection[str]] | None = None) -> dict[str, LayerStats]:
        """:meth:`measure_stage` of all of layer ``index``, which must be :attr:`next`, before any of it is
        replaced."""
        return self.measure_stage(whole(index, self._current(index)), wanted)

    def advance(self, index: int, replaced: Mapping[str, torch.Tensor | QuantizedTensor],
                changed: Mapping[str, torch.Tensor] | None = None) -> None:
        """:meth:`advance_stage` of all of layer ``index``, which must be :attr:`next`."""
        self.advance_stage(whole(index, self._current(index)), replaced, changed)

    @torch.no_grad()
    def measure_stage(self, stage: Stage,
                      wanted: Mapping[str, Collection[str]] | None = None) -> dict[str, LayerStats]:
        """Statistics of the inputs of a stage's Linears, by full name.

        Linears that share an input share its statistics too; a token counts there as it does for them on
        average. An expert's are of the tokens that were sent to it; of one that got none they are zeros.

        Args:
            stage: the next one.
            wanted: full names of the Linears that need statistics, and which; of all ``"hessian"`` and
                ``"largest"`` by default. Who needs no ``"hessian"`` isn't given one, unless it shares its
                input with one who does. ``"drift"`` isn't measured for a layer's last stage: experts' inputs
                are known only while they run, and ``down_proj``'s drift costs more than all others together.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
            CalibrationError: nothing reached a Linear, or its Hessian overflows.
        """
        names = [name for name in stage.linears if wanted is None or name in wanted]
        key = {name: self._shares[name] for name in names}
        formed = {key[name] for name in names if wanted is None or {"hessian", "drift"} & set(wanted[name])}
        drifted = not stage.last and wanted is not None and any("drift" in wanted[name] for name in names)
        observers: dict[str, HessianObserver] = {}
        for name in names:
            if key[name] not in observers:
                observers[key[name]] = stage.linears[name].observer = HessianObserver(
                    name, self._importance_of([other for other in names if key[other] == key[name]]),
                    stage.linears[name].shape[1] if EXPERT in name else None, key[name] in formed,
                    self._correlation)
        try:
            first = 0
            for i in range(len(self._states) if observers else 0):
                states = self._states.get(i)
                for observer in observers.values():
                    observer.first = first
                    if drifted and stage.inputs and self._original:
                        observer.original = stage.inputs(self._original.get(i))
                try:
                    if stage.inputs is None:
                        self._run(stage, states)
                    else:
                        for observer in observers.values():
                            observer(stage.inputs(states))
                except NonFiniteError as error:
                    raise self._traced(stage, i, states, error) from None
                first += states[0].shape[0] * states[0].shape[1]
        finally:
            for linear in stage.linears.values():
                linear.observer = None
        self._run_original(stage)
        statistics = {key_of_input: observer.result() for key_of_input, observer in observers.items()}
        return {name: statistics[key[name]] for name in names}

    def forget(self, names: Collection[str]) -> None:
        """Let go of weights that were measured, which :meth:`advance_stage` will be given anew."""
        if self._layer is not None:
            for name, linear in self._layer.linears().items():
                if name in names:
                    linear.weight = PlainWeight(torch.empty(0, 0))

    @torch.no_grad()
    def advance_stage(self, stage: Stage, replaced: Mapping[str, torch.Tensor | QuantizedTensor],
                      changed: Mapping[str, torch.Tensor] | None = None) -> None:
        """Push the hidden states through a stage with some weights replaced; drop the layer behind its last.

        Args:
            stage: the next one.
            replaced: new weights ``[out, in]`` by the full name of their Linear.
            changed: other new tensors of the layer (norms, biases, a router's, a kept weight), by full
                name, if the stage is all of it.

        Raises:
            NonFiniteError: a value isn't finite; sample, layer and tensor are named.
        """
        self._run_original(stage)
        if changed:
            stage = whole(stage.index, DecoderLayer(self._config, stage.index,
                                                    self._weights.with_changed(changed)))
        for name, linear in stage.linears.items():
            if name in replaced:
                linear.weight = self._weights.kept(PlainWeight(self._plain(replaced[name])))
        for i in range(len(self._states)):
            self._push(stage, self._states, i)
        self._ahead = False
        if stage.last:
            self._layer = None
            self.next += 1
        else:  # they have done what they are for
            for linear in stage.linears.values():
                linear.weight = PlainWeight(torch.empty(0, 0))

    @torch.no_grad()
    def measure_head(self, name: str) -> LayerStats:
        """Statistics of what the head multiplies: what the last layer leaves, normalized. All layers must
        have been advanced through.

        Args:
            name: the name of the head, ``model.embed_tokens`` where it is that.

        Raises:
            NonFiniteError: a value isn't finite; sample and tensor are named.
            CalibrationError: its Hessian overflows.
        """
        if self.next != self._config.num_layers:
            raise ValueError(f"the head was asked for, the hidden states are at {self.next}")
        norm = RMSNorm("model.norm", self._config.hidden_size, self._config, self._weights)
        observer = HessianObserver(name, self._importance_of([name]),
                                   correlation=self._correlation)
        samples = (state for i in range(len(self._states)) for state in self._states.get(i)[0])
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

    def _run(self, stage: Stage, states: States) -> States:
        return stage.run(states, self._positions[:states[0].shape[0]])

    def _run_original(self, stage: Stage) -> None:
        """Push the original model's states through a stage, before its weights are replaced or forgotten."""
        if self._original is None or self._ahead:
            return
        for i in range(len(self._original)):
            self._push(stage, self._original, i)
        self._ahead = True

    def _push(self, stage: Stage, stream: StatesOfBatches, batch: int) -> None:
        states = stream.take(batch)
        result = self._run(stage, states)
        try:
            check_finite_states(result[-1], batch * self._batch, stage.result, stage.index)
        except NonFiniteError as error:
            raise self._traced(stage, batch, states, error) from None
        stream.put(batch, result)

    def _plain(self, weight: torch.Tensor | QuantizedTensor) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            rotated = weight.spec.rotation is not None
            weight = registry("formats").get(weight.format).dequantize(weight)
            assert isinstance(weight, torch.Tensor)
            weight = undo_hadamard(weight) if rotated else weight
        return weight.to(device=self._weights.device, dtype=self._weights.dtype)

    def _traced(self, stage: Stage, batch: int, entered: States, error: NonFiniteError) -> NonFiniteError:
        """The same with sample and tensor."""
        def run(place: int) -> torch.Tensor:
            return self._run(stage, tuple(states[place:place + 1] for states in entered))[-1]

        return first_nonfinite(run, stage.linears, len(entered[0]), batch * self._batch, stage.index,
                               stage.result) or error


class StatesOfBatches:
    """What is between two stages, batch by batch.

    Args:
        spill: the store that keeps it.
        prefix: begins its keys there.
        batches: the number of batches.
        device: the device on which it is given back.
    """

    def __init__(self, spill: Spill, prefix: str, batches: int, device: torch.device) -> None:
        self._spill, self._prefix = spill, prefix
        self._device = device
        self._sizes = [0] * batches

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, batch: int, states: States) -> None:
        """Keep them, in place of what was taken."""
        self._sizes[batch] = len(states)
        for part, tensor in enumerate(states):
            self._spill.put(self._key(batch, part), tensor)

    def get(self, batch: int) -> States:
        """Without forgetting them; the caller must not write to them."""
        return self._each(batch, self._spill.get)

    def take(self, batch: int) -> States:
        return self._each(batch, self._spill.take)

    def _each(self, batch: int, read: Callable[[str], torch.Tensor]) -> States:
        return tuple(read(self._key(batch, part)).to(self._device) for part in range(self._sizes[batch]))

    def _key(self, batch: int, part: int) -> str:
        return f"{self._prefix}{batch}.{part}"


_BLOCK = 384  # columns a multiply: the sum is symmetric, so only blocks on and below the diagonal are made
WIDE = 1024
"""Columns from which rounded products save time."""


class HessianObserver:
    """Sums ``x xᵀ`` over every token that enters a layer, and keeps the largest ``|x|``. Assign it to
    ``Linear.observer``.

    One observer stands for all layers that share an input. Sums are float32: with 10⁵ tokens the rounding is
    far below the noise of choosing those tokens.

    Args:
        name: the layer watched, for messages.
        importance: float32 ``[tokens]``, a weight on each of all tokens, 1 on average.
        size: *in*, where it may be that no token comes, as with experts: the result is zeros then.
        form: whether the sum of ``x xᵀ`` is wanted.
        correlation: factor on the Hessian beside its diagonal; below 1 where tokens are no text.

    Attributes:
        original: the input of the layer in the original model for the tokens of the next call,
            ``[…, in]``: how far the two are apart is summed too. A call uses it up.
        tokens: the number of tokens that entered the layer so far.
        first: number of the first token of the forward pass that is under way.
    """

    def __init__(self, name: str, importance: torch.Tensor | None = None, size: int | None = None,
                 form: bool = True, correlation: float = 1.0) -> None:
        self.name, self.importance = name, importance
        self.tokens = self.first = 0
        self._size = size
        self._form, self._correlation = form, correlation
        self._sum: torch.Tensor | None = None
        self._drift: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None
        self.original: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Take ``x [..., in]``, any floating dtype. Raises NonFiniteError if a value isn't finite.

        Args:
            x: the input of the layer.
            tokens: int64 ``[n]``, which of the pass's tokens these are; by default all, in order.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        check_finite_input(rows, self.name)
        if not rows.shape[0]:
            return
        self.tokens += rows.shape[0]
        largest = rows.abs().amax(dim=0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        if not self._form:
            return
        if self._sum is None:
            self._sum = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        roots = None  # of what each token counts: both sides get them, and the sum stays positive definite
        if self.importance is not None:
            if tokens is None:
                tokens = torch.arange(rows.shape[0], device=rows.device)
            counts = self.importance[self.first + tokens.to(self.importance.device)]
            roots = counts.sqrt()[:, None].to(rows.device)
        weighted = rows if roots is None else rows * roots
        with rounded_products() if rows.shape[1] >= WIDE else nullcontext():
            for start in range(0, rows.shape[1], _BLOCK):
                stop = start + _BLOCK
                self._sum[start:stop, :stop].addmm_(weighted[:, start:stop].T, weighted[:, :stop])
            if self.original is not None:
                if self._drift is None:
                    self._drift = torch.zeros_like(self._sum)
                drift = self.original.reshape(rows.shape).to(torch.float32) - rows
                self._drift.addmm_(drift.T, rows if roots is None else weighted.mul_(roots))
                self.original = None

    def result(self) -> LayerStats:
        """The mean over the tokens seen; once.

        Raises:
            CalibrationError: nothing was seen, or a sum overflowed float32.
        """
        if self._largest is None and self._size is not None:
            form = torch.zeros(self._size, self._size) if self._form else None
            return LayerStats(0, form, torch.zeros(self._size))
        if self._largest is None:
            raise CalibrationError(f"no calibration token reached {self.name}",
                                   next="give more or longer calibration windows: --windows, --window")
        if self._sum is None:
            return LayerStats(self.tokens, None, self._largest)
        hessian, self._sum = symmetric_(self._sum), None  # in place: a copy may be as large as all the rest
        hessian /= self.tokens
        if not all_finite(hessian):
            raise CalibrationError(f"the Hessian of {self.name} overflows float32",
                                   why="its inputs are large throughout; the model itself may be damaged",
                                   next=NEXT)
        drift, self._drift = self._drift, None
        if drift is not None:
            drift /= self.tokens
            if not all_finite(drift):
                raise CalibrationError(f"the drift of {self.name} overflows float32",
                                       why="its inputs in the original model are too large", next=NEXT)
        if self._correlation != 1:
            diagonal = hessian.diagonal().clone()
            hessian.mul_(self._correlation).diagonal().copy_(diagonal)
        notes: tuple[str, ...] = ()
        # an expert may have got tokens of other windows than those that were weighed
        if self.importance is not None and self._size is None and bool((self.importance == 1).all()):
            notes = ("all calibration tokens count the same: no answer of the model depends on it",)
        return LayerStats(self.tokens, hessian, self._largest, notes, drift)


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
        check_finite_states(x, i * batch, "the hidden state after the embedding")
        yield x
