"""What the rules of other engines are made of: the facts of a checkpoint, and the kinds of rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.checkpoint.integrity import VerifyCheck
from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import linear_slots
from quantkit.models.config import ModelConfig

MARLIN_GROUPS = (-1, 32, 64, 128)
TRITON_GROUPS = (*MARLIN_GROUPS, 256)
FOUR_OR_EIGHT = ((4, True), (4, False), (8, True))
"""Bits, and whether they are symmetric, that Marlin multiplies."""
BYTES = ("int-quantized", "float-quantized")
"""Layouts of a byte a weight, which have kernels of their own."""
EIGHT_BIT = (*BYTES, "fine-grained-fp8")
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


@dataclass(frozen=True)
class CheckpointFacts:
    """What rules look at.

    Attributes:
        method: ``quant_method``; ``None`` if nothing is quantized.
        quantization: the config's ``quantization_config``.
        rows: the rows of all Linears.
        embedding: its row, if it is quantized.
        device: ``cuda`` or ``cpu``.
        dtype: the model's own.
        config: the content of ``config.json``.
        model: the model's shape, as it says.
        global_scales: name → the numbers beside a layer's e4m3 scales, where tensors could be read.
    """

    method: str | None
    quantization: Mapping[str, Any]
    rows: tuple[LayerRow, ...]
    embedding: LayerRow | None
    device: str
    dtype: str
    config: Mapping[str, Any]
    model: ModelConfig
    global_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head too."""
        return self.model.tie_word_embeddings

    @property
    def linears(self) -> list[EngineLayer]:
        return [EngineLayer(row.name, row, row.shape[0]) for row in self.rows]

    @property
    def packed(self) -> list[EngineLayer]:
        return [layer for layer in self.linears if layer.row.spec]

    @property
    def experts(self) -> list[EngineLayer]:
        """The Linears of experts, quantized or not."""
        return [layer for layer in self.linears if ".experts." in layer.name]

    def fused(self) -> dict[str, list[LayerRow]]:
        """q, k and v, and gate and up, as engines fuse them: into one weight."""
        shares = {slot.name: slot.shares for slot in linear_slots(self.model)}
        groups: dict[str, list[LayerRow]] = defaultdict(list)
        for row in self.rows:
            if shares[row.name].endswith((".qkv", ".gate_up")):
                groups[shares[row.name]].append(row)
        return groups

    def expert_groups(self) -> dict[str, list[LayerRow]]:
        """The experts of each layer, which engines keep in one weight or two."""
        groups: dict[str, list[LayerRow]] = defaultdict(list)
        for layer in self.experts:
            groups[layer.name.partition(".experts.")[0]].append(layer.row)
        return groups

    @property
    def weights(self) -> list[EngineLayer]:
        """What an engine multiplies by: a quantized layer for each, with the rows of all fused in it."""
        places = {row.name: (name, group) for name, group in self.fused().items() if len(group) > 1
                  for row in group}
        weights: dict[str, EngineLayer] = {}
        for row in self.rows:
            if row.spec:
                name, group = places.get(row.name, (row.name, [row]))
                weights.setdefault(name, EngineLayer(name, row, sum(part.shape[0] for part in group)))
        return list(weights.values())

    @property
    def integer_weights(self) -> list[EngineLayer]:
        """Those of them whose layout has no kernels of its own."""
        return [weight for weight in self.weights if weight.is_packed_integers]


@dataclass(frozen=True)
class EngineLayer:
    """A weight as an engine sees it.

    Attributes:
        name: the name of the layer, or of the weight that it is fused into.
        row: the layer's row of the manifest.
        out: rows of all that is fused in it.
    """

    name: str
    row: LayerRow
    out: int

    @property
    def spec(self) -> QuantSpec:
        """How it is quantized, where it is."""
        assert self.row.spec is not None
        return self.row.spec

    @property
    def label(self) -> str:
        return self.spec.label()

    @property
    def format(self) -> str | None:
        return self.row.format

    @property
    def columns(self) -> int:
        return self.row.shape[1]

    @property
    def strategy(self) -> str:
        return self.spec.granularity.strategy

    @property
    def size(self) -> int:
        """Weights that share a scale; -1: a row."""
        return self.spec.granularity.size or -1

    @property
    def is_packed_integers(self) -> bool:
        """Whether its layout isn't one with kernels of its own."""
        return self.format not in (*EIGHT_BIT, *FP4)

    @property
    def fits_marlin(self) -> bool:
        """Whether Marlin multiplies weights of this width."""
        return (self.spec.bits, self.spec.symmetric) in FOUR_OR_EIGHT


Rule = Callable[[CheckpointFacts], Iterator[VerifyCheck]]
Broken = Callable[[EngineLayer], Any]


@dataclass(frozen=True)
class Limit:
    """What an engine takes of each layer.

    Attributes:
        name: the name of the check.
        faults: conditions that break it, and what is told of the first layer that does: a format of ``layer``
            and ``dtype``.
        fine: told if no layer breaks it; ``None``: nothing is.
        among: the layers that are asked, an attribute of :class:`CheckpointFacts`.
        device: the only device on which it holds; ``None``: all.
        of: only these of the layers are asked, and nothing is told where there are none.
    """

    name: str
    faults: tuple[tuple[Broken, str], ...]
    fine: str | None
    among: str = "packed"
    device: str | None = None
    of: Broken | None = None

    def __call__(self, subject: CheckpointFacts) -> Iterator[VerifyCheck]:
        layers = getattr(subject, self.among)
        if self.of is not None:
            layers = [layer for layer in layers if self.of(layer)]
        if self.device not in (None, subject.device) or (self.of is not None and not layers):
            return
        faults = [(layer.name, words.format(layer=layer, dtype=subject.dtype)) for layer in layers
                  if (words := next((words for broken, words in self.faults if broken(layer)), None))]
        if faults or self.fine is not None:
            yield from report(self.name, faults, self.fine or "")


@dataclass(frozen=True)
class Note:
    """A remark about a checkpoint as a whole, or a refusal if ``status`` is ``failed``.

    Attributes:
        name: the name of the check.
        words: a format of ``facts``.
        status: ``note`` or ``failed``.
        device: the only device on which it is told; ``None``: all.
        unless_dtype: it isn't told of models in this dtype.
        where: only told if there is such a quantized layer.
        unless: not told where this rule fails.
    """

    name: str
    words: str
    status: Literal["note", "failed"] = "note"
    device: str | None = None
    unless_dtype: str | None = None
    where: Broken | None = None
    unless: Rule | None = None

    def __call__(self, subject: CheckpointFacts) -> Iterator[VerifyCheck]:
        if self.device not in (None, subject.device) or self.unless_dtype == subject.dtype or (
                self.where is not None and not any(map(self.where, subject.packed))) or (
                self.unless is not None and any(check.status == "failed" for check in self.unless(subject))):
            return
        yield VerifyCheck(self.name, self.status, self.words.format(facts=subject))


def report(name: str, faults: Sequence[tuple[str, str]], fine: str) -> Iterator[VerifyCheck]:
    """One line a rule: the first layer that breaks it, and how many do."""
    if not faults:
        yield VerifyCheck(name, "ok", fine)
        return
    layer, why = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    yield VerifyCheck(name, "failed", f"{layer}: {why}{more}")
