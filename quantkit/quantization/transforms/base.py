"""The interface of transforms, and the decoder layer that they change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.models.config import ModelConfig
from quantkit.models.scale_groups import ScaleGroup
from quantkit.quantization.methods.base import LayerStats, MethodOptions
from quantkit.sources.base import ModelSource


class LayerTensors:
    """One decoder layer between measuring and solving: its tensors as they are changed, and their inputs.

    Args:
        read: full name of a tensor → the model's, in the dtype in which it is stored.
        has: whether there is such a tensor.
        specs: of the Linears that will be quantized, by full name.
        stats: of their inputs; replaced as the inputs change.
        offset_norms: the norms' weights are stored less 1.

    Attributes:
        changed: new tensors by full name: norms and biases in the dtype in which they are stored,
            weights of Linears in float32.
    """

    def __init__(self, read: Callable[[str], torch.Tensor], has: Callable[[str], bool],
                 specs: Mapping[str, QuantSpec], stats: dict[str, LayerStats],
                 offset_norms: bool = False) -> None:
        self._read, self._has, self.specs, self.stats = read, has, specs, stats
        self._offset = 1.0 if offset_norms else 0.0
        self.changed: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is now, float32."""
        return (self.changed[name] if name in self.changed else self._read(name)).float()

    def weights(self, names: Sequence[str]) -> tuple[torch.dtype | torch.Tensor, ...]:
        """The dtype in which the model stores these tensors; then they as they are now, float32 if they were
        changed."""
        originals = [self._read(name) for name in names]
        return originals[0].dtype, *(map(self.changed.get, names, originals))

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is now, in the dtype in which the model stores it."""
        original = self._read(name)
        return self.changed[name].to(original.dtype) if name in self.changed else original

    def fault(self) -> str | None:
        """What is wrong with :attr:`changed`; ``None``: nothing."""
        for name, tensor in self.changed.items():
            if not isinstance(name, str) or not self._has(name):
                return f"it changes {name!r}, which the model doesn't have"
            if not isinstance(tensor, torch.Tensor):
                return f"{name} became a {type(tensor).__name__}"
            if tensor.shape != (shape := self._read(name).shape):
                return f"{name} became {list(tensor.shape)}; it is {list(shape)}"
        return None

    def scale(self, seam: ScaleGroup, by: torch.Tensor) -> None:
        """Divide what writes a seam's channels, multiply what reads them, tell the statistics.

        A norm's weight is rounded to the dtype it is stored in, and the readers take what it was really
        divided by: the function stays the same to float32's last bits. A channel with a weight of 0 stays.

        Args:
            seam: of this layer.
            by: float32 ``[channels]``, positive.
        """
        if seam.rows is None:
            by = self._scale_norm(f"{seam.writer}.weight", by)
        else:
            self._scale_rows(seam.writer, seam.rows, by)
        columns = seam.spread(by)
        scaled: dict[int, LayerStats] = {}  # readers may share theirs
        for reader in seam.readers:
            self.changed[f"{reader}.weight"] = self.tensor(f"{reader}.weight") * columns
            if (stats := self.stats.get(reader)) is not None:
                if id(stats) not in scaled:
                    scaled[id(stats)] = _scaled(stats, columns)
                self.stats[reader] = scaled[id(stats)]
        if seam.router is not None:
            name = f"{seam.router}.weight"
            self.changed[name] = (self.tensor(name) * columns).to(self._read(name).dtype)

    def _scale_norm(self, name: str, by: torch.Tensor) -> torch.Tensor:
        stored, now = self._read(name), self.tensor(name) + self._offset
        rounded = (now / by - self._offset).to(stored.dtype)
        effective = rounded.float() + self._offset
        lost = (now == 0) | (effective == 0) | ~torch.isfinite(effective)
        self.changed[name] = torch.where(lost, self.tensor(name).to(stored.dtype), rounded)
        return torch.where(lost, torch.ones_like(by), now / effective)

    def _scale_rows(self, writer: str, rows: tuple[int, int], by: torch.Tensor) -> None:
        part = slice(*rows)
        weight = self.tensor(f"{writer}.weight").clone()
        weight[part] /= by[:, None]
        self.changed[f"{writer}.weight"] = weight
        if self._has(name := f"{writer}.bias"):
            bias = self.tensor(name).clone()
            bias[part] /= by
            self.changed[name] = bias.to(self._read(name).dtype)


def _scaled(stats: LayerStats, columns: torch.Tensor) -> LayerStats:
    """The statistics of inputs that are divided by ``columns``."""
    hessian, largest, drift = stats.hessian, stats.largest, stats.drift
    return dataclasses.replace(
        stats, hessian=None if hessian is None else hessian / columns / columns[:, None],
        drift=None if drift is None else drift / columns / columns[:, None],
        largest=None if largest is None else largest / columns)


def _unchanged(source: ModelSource, config: ModelConfig, options: MethodOptions) -> ModelSource:
    return source


@dataclass(frozen=True)
class Transform:
    """A registered transform. It changes the whole model before anything is measured, or every decoder layer
    after its inputs were.

    Attributes:
        name: its name in recipes.
        paper: link to the paper.
        source: presents the model in its changed form; data-free.
        layer: ``(config, index, tensors, options)``, changes ``tensors``; calibrated. It must depend on
            nothing else, so that a run that is resumed does the same.
        needs: statistics that ``layer`` must be given: ``"hessian"`` or ``"largest"``.
        options: its options' model.
        refuses: why a model can't be changed so; ``None`` if it can.
        idle: why ``layer`` has nothing to do for Linears of a spec; ``None`` if it has.
    """

    name: str
    paper: str
    source: Callable[[ModelSource, ModelConfig, MethodOptions], ModelSource] = _unchanged
    layer: Callable[[ModelConfig, int, LayerTensors, MethodOptions], None] | None = None
    needs: frozenset[str] = frozenset()
    options: type[MethodOptions] = MethodOptions
    refuses: Callable[[ModelConfig], str | None] = lambda config: None
    idle: Callable[[QuantSpec], str | None] = lambda spec: None
