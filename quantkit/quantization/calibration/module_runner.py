"""Pushes calibration tokens through the modules that transformers has for a family, layer by layer.

The same work as :mod:`quantkit.quantization.calibration.runner` does with layers of our own, for families
whose mathematics isn't known here, in the same stages. A stage is measured by running the whole layer, with
what is quantized of it so far. What enters a Linear is seen where torch multiplies by its weight, or by a
part of it: so an expert is measured alone whose weight lies in one tensor with all others, and a family's
modules may be of any class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantkit.formats.base import QuantizedTensor
from quantkit.models.architecture import EXPERT
from quantkit.models.outline import Outline
from quantkit.ops.packing import dequantize
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.finite import behind, check_finite_states
from quantkit.quantization.calibration.module_blocks import ModuleBlocks, Passed
from quantkit.quantization.calibration.runner import HessianObserver
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.memory import BATCH_TOKENS
from quantkit.quantization.methods.base import LayerStats
from quantkit.sources.base import ModelSource

_TIMES = {"linear": (0, 1), "matmul": (0, 1), "__matmul__": (0, 1), "mm": (0, 1), "bmm": (0, 1),
          "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
"""Functions of torch that multiply by a weight: the places of input and weight among their arguments."""


@dataclass(frozen=True)
class BlockStage:
    """Linears of a layer that are measured and solved together.

    Attributes:
        linears: the Linears by full name.
        last: whether it is the layer's last stage.
    """

    index: int
    linears: Collection[str]
    last: bool = True


class ModuleRunner:
    """Hidden states between two layers, in place of
    :class:`~quantkit.quantization.calibration.runner.LayerRunner`.

    Args:
        source: the *original* model.
        outline: of it.
        tokens: int64 ``[windows, tokens]``.
        states: keeps the hidden states.
        device: the device that layers compute on, in float32.
        correlation: factor on Hessians beside their diagonals; below 1 where tokens are no text.
        drift: the original model's states are kept too, so that it can be measured how far a Linear's inputs
            have come away from them.

    Attributes:
        next: index of the layer that the hidden states are the input of.

    Raises:
        UnsupportedModelError: as :class:`~quantkit.quantization.calibration.module_blocks.ModuleBlocks`.
    """

    def __init__(self, source: ModelSource, outline: Outline, tokens: torch.Tensor, states: Spill,
                 device: torch.device, correlation: float = 1.0, drift: bool = False) -> None:
        self._blocks = ModuleBlocks(source, outline, device)
        self._blocks.prepare(tokens)
        self._outline, self._device, self._correlation = outline, device, correlation
        self._batch = max(1, BATCH_TOKENS // tokens.shape[1])
        self._tokens = tokens.split(self._batch)
        self._states = PassedOfBatches(states, "", device)
        self._original = PassedOfBatches(states, "original-", device) if drift else None
        self._inputs = states  # of Linears in the original model, while their layer is worked on
        self._replaced: dict[str, QuantizedTensor] = {}
        self._places: dict[str, list[list[str]]] = {}
        self._drifting: set[str] = set()  # the Linears whose inputs' drift can be measured
        self._ahead = False  # the original states are behind the layer that is next
        self.next = 0

    def stages(self, index: int) -> list[BlockStage]:
        """Those of layer ``index``, which must be :attr:`next`: Linears that see the same input, in the order
        in which the family's code gets to them; experts are one."""
        assert index == self.next
        names = [slot.name for slot in self._outline.slots if slot.layer == index]
        tags = self._blocks.tagged(index, names)
        self._places = {name: _owners(tag, names) for name, tag in tags.items() if tag.dim() >= 2}
        del tags
        self._replaced.clear()
        order = OrderedInputs(self._parameters(index))
        with order:
            self._blocks.run(index, self._tokens[0], self._states.get(0))
        groups = order.groups(names)
        self._drifting = {name for group in groups[:-1] for name in group if EXPERT not in name}
        return [BlockStage(index, frozenset(group), number == len(groups) - 1)
                for number, group in enumerate(groups)]

    def measure_stage(self, stage: BlockStage,
                      wanted: Mapping[str, Collection[str]]) -> dict[str, LayerStats]:
        """Statistics of the inputs of these Linears, by full name. Those that see the same input share them;
        of one that no token reaches they are zeros.

        Raises:
            NonFiniteError: a value isn't finite; layer and tensor are named.
            UnsupportedModelError: the family's code fails.
            CalibrationError: a Hessian overflows.
        """
        names = list(wanted)
        if not names:
            return {}
        self._advance_original(stage.index)
        observed = ObservedInputs(self._parameters(stage.index), {name: HessianObserver(
            name, size=self._width(name), form=bool({"hessian", "drift"} & set(wanted[name])),
            correlation=self._correlation) for name in names})
        drifted = [name for name in names if name in self._drifting and "drift" in wanted[name]]
        for batch in range(len(self._tokens)):
            observed.original = {name: self._inputs.get(key).to(self._device) for name in drifted
                                 if (key := f"input-{batch}.{name}") in self._inputs}
            with observed:
                self._blocks.run(stage.index, self._tokens[batch], self._states.get(batch))
        return observed.results()

    def forget(self, names: Collection[str]) -> None:
        """Let go of the layer's weights, which :meth:`advance_stage` will load anew."""
        self._blocks.unload()

    def advance_stage(self, stage: BlockStage, replaced: Mapping[str, QuantizedTensor]) -> None:
        """Take note of weights that are quantized, by the name of their Linear; behind a layer's last stage,
        push the hidden states through it with these.

        Raises:
            NonFiniteError: a value isn't finite; sample and layer are named.
        """
        self._replaced |= {name: replaced[name] for name in stage.linears if name in replaced}
        if not stage.last:
            return
        self._advance_original(stage.index)
        self._load(stage.index)
        for batch, tokens in enumerate(self._tokens):
            passed = self._blocks.run(stage.index, tokens, self._states.take(batch))
            states = next(leaf for leaf in pytree.tree_leaves(passed.outputs) if torch.is_tensor(leaf))
            check_finite_states(states, batch * self._batch, behind(stage.index), stage.index)
            self._states.put(batch, passed)
        self._blocks.unload()
        self._inputs.drop("input-")
        self._ahead = False
        self.next += 1

    def _load(self, index: int) -> torch.nn.Module:
        """The layer with the weights that are quantized so far."""
        return self._blocks.load(index, {
            f"{name}.weight": dequantize(registry("formats").get(weight.format), weight)
            for name, weight in self._replaced.items()})

    def _parameters(self, index: int) -> dict[str, tuple[torch.Tensor, list[list[str]]]]:
        """The layer's, loaded, each with whose weights every one of its matrices is made of."""
        block = self._load(index)
        return {name: (parameter, self._places[name]) for name, parameter in block.named_parameters()
                if name in self._places}

    def _advance_original(self, index: int) -> None:
        """Push the original model's states through a layer, once, and keep what enters its Linears there."""
        if self._original is None or self._ahead:
            return
        self._ahead = True
        replaced, self._replaced = self._replaced, {}
        recorded = RecordedInputs(self._parameters(index), self._drifting)
        for batch, tokens in enumerate(self._tokens):
            with recorded:
                passed = self._blocks.run(index, tokens, self._original.take(batch))
            self._original.put(batch, passed)
            for name, x in recorded.inputs.items():
                self._inputs.put(f"input-{batch}.{name}", x)
            recorded.inputs.clear()
        self._replaced = replaced

    def _width(self, name: str) -> int:
        return next(slot.in_features for slot in self._outline.slots if slot.name == name)


def _owners(tag: torch.Tensor, names: Sequence[str]) -> list[list[str]]:
    """Whose weights a parameter is made of, of each of its matrices those along the side that isn't summed
    over; by what :meth:`ModuleBlocks.tagged` has left in it."""
    matrices = tag.reshape(-1, *tag.shape[-2:])
    owners = []
    for matrix in matrices:
        places = {int(place) for side in (matrix[0], matrix[:, 0]) for place in side.unique()}
        owners.append([names[place - 1] for place in sorted(places) if 0 < place <= len(names)])
    return owners


class _Products(TorchFunctionMode):
    """Sees what is multiplied by weights, while it is entered.

    Args:
        parameters: by name, each with whose weights every one of its matrices is made of.
    """

    def __init__(self, parameters: Mapping[str, tuple[torch.Tensor, list[list[str]]]]) -> None:
        super().__init__()
        self._ranges = [(parameter.data_ptr(), parameter, owners)
                        for parameter, owners in parameters.values() if any(owners)]

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        places = _TIMES.get(getattr(func, "__name__", ""))
        if places is not None and len(args) > places[1]:
            self._see(args[places[0]], args[places[1]])
        return func(*args, **(kwargs or {}))

    def _see(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        start, parameter, owners = next((entry for entry in self._ranges if 0 <= weight.data_ptr() - entry[0]
                                         < entry[1].nbytes), (0, None, []))
        if parameter is None:
            return
        offset = weight.data_ptr() - start
        size = parameter.shape[-1] * parameter.shape[-2] * parameter.element_size()
        if weight.dim() > 2 and x.dim() > 2 and weight.shape[0] == len(owners):
            for part, names in zip(x, owners, strict=True):
                self.take(part[part.any(-1)], names)  # of the others the expert has got none
        else:
            self.take(x, owners[offset // size])

    def take(self, x: torch.Tensor, names: Sequence[str]) -> None:
        """``x [..., in]`` enters the Linears of these names."""


class OrderedInputs(_Products):
    """Finds out which Linears see the same input, and in which order they are multiplied by."""

    def __init__(self, parameters: Mapping[str, tuple[torch.Tensor, list[list[str]]]]) -> None:
        super().__init__(parameters)
        self._inputs: list[tuple[torch.Tensor, list[str]]] = []

    def take(self, x: torch.Tensor, names: Sequence[str]) -> None:
        group = next((group for seen, group in self._inputs if _same(seen, x)), None)
        if group is None:
            self._inputs.append((x, group := []))
        group += [name for name in names if name not in group]

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """All of these names: experts as one group in the place of the first, those not seen at the end."""
        groups: list[list[str]] = []
        experts = [name for name in names if EXPERT in name]
        seen: set[str] = set(experts)
        for _, group in self._inputs:
            if experts and any(EXPERT in name for name in group):
                groups.append(experts)
                experts = []
            if dense := [name for name in group if name not in seen]:
                groups.append(dense)
                seen.update(dense)
        rest = [*experts, *(name for name in names if name not in seen)]
        return [*groups, rest] if rest or not groups else groups


class RecordedInputs(_Products):
    """Keeps what enters some Linears: of those that share it under the first one's name.

    Args:
        names: full names of these.

    Attributes:
        inputs: by name.
    """

    def __init__(self, parameters: Mapping[str, tuple[torch.Tensor, list[list[str]]]],
                 names: Collection[str]) -> None:
        super().__init__(parameters)
        self._names = names
        self.inputs: dict[str, torch.Tensor] = {}
        self._last: torch.Tensor | None = None

    def take(self, x: torch.Tensor, names: Sequence[str]) -> None:
        if names and names[0] in self._names and (self._last is None or not _same(self._last, x)):
            self.inputs[names[0]] = x
        self._last = x


class ObservedInputs(_Products):
    """Sums up what enters Linears. Those that see the same input share what is summed.

    Args:
        observers: sum what enters, by a Linear's name.

    Attributes:
        original: what enters Linears in the original model for the tokens of the next pass, by name.
    """

    def __init__(self, parameters: Mapping[str, tuple[torch.Tensor, list[list[str]]]],
                 observers: Mapping[str, HessianObserver]) -> None:
        super().__init__(parameters)
        self._observers = observers
        self.original: dict[str, torch.Tensor] = {}
        self._leaders: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def results(self) -> dict[str, LayerStats]:
        """By a Linear's name."""
        made = {name: observer.result() for name, observer in self._observers.items()
                if self._leaders.get(name, name) == name}
        made = {name: stats if stats.tokens or EXPERT in name else replace(
            stats, notes=("no product with it was seen in transformers' module: it is rounded",))
            for name, stats in made.items()}
        return {name: made[self._leaders.get(name, name)] for name in self._observers}

    def take(self, x: torch.Tensor, names: Sequence[str]) -> None:
        for name in filter(self._observers.__contains__, names):
            if self._last is not None and _same(self._last[0], x) and self._leaders.get(
                    name, self._last[1]) == self._last[1]:
                self._leaders[name] = self._last[1]
                continue
            assert self._leaders.setdefault(name, name) == name
            self._observers[name].original = self.original.pop(name, None)
            self._observers[name](x)
            self._last = x, name


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, in the same state."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
                      and a._version == b._version)


_KEPT = object()
"""In the place of a tensor that the spill has."""


class PassedOfBatches:
    """What is between two layers, batch by batch.

    Args:
        spill: keeps its tensors.
        prefix: begins its keys there.
        device: the device on which it is given back.
    """

    def __init__(self, spill: Spill, prefix: str, device: torch.device) -> None:
        self._spill, self._prefix, self._device = spill, prefix, device
        self._trees: dict[int, tuple[list[Any], pytree.TreeSpec]] = {}

    def put(self, batch: int, passed: Passed) -> None:
        leaves, tree = pytree.tree_flatten((passed.outputs, passed.shared))
        for part, leaf in enumerate(leaves):
            if torch.is_tensor(leaf):
                self._spill.put(f"{self._prefix}{batch}.{part}", leaf)
        self._trees[batch] = [_KEPT if torch.is_tensor(leaf) else leaf for leaf in leaves], tree

    def get(self, batch: int) -> Passed | None:
        """Without forgetting it; ``None`` before the first layer."""
        return self._each(batch, self._spill.get)

    def take(self, batch: int) -> Passed | None:
        return self._each(batch, self._spill.take)

    def _each(self, batch: int, read: Callable[[str], torch.Tensor]) -> Passed | None:
        if batch not in self._trees:
            return None
        others, tree = self._trees[batch]
        leaves = [read(f"{self._prefix}{batch}.{part}").to(self._device) if leaf is _KEPT else leaf
                  for part, leaf in enumerate(others)]
        outputs, shared = pytree.tree_unflatten(leaves, tree)
        return Passed(outputs, shared)
