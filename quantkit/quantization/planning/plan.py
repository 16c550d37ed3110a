"""Resolves a recipe against one model: one row per layer, with exact bytes and predicted peaks.

Everything that could fail later because of a spec, an option or a shape fails here, before any work
and for all layers at once. :func:`make_plan` reads no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from quantkit.kv.build import build_kv_codecs, build_policy
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import (
    EMBEDDING,
    EXPERT,
    HEAD,
    all_slots,
    linear_slots,
    parse_config,
)
from quantkit.models.loadable import check_loadable
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.importance import BACKWARD, FORWARD
from quantkit.quantization.memory import STATES_IN_MEMORY, peak_bytes, states_bytes, walks_bytes
from quantkit.quantization.planning.layers import LayerRefusal, PlanRow, RowResolver, assign
from quantkit.quantization.planning.recovery_memory import recovery_disk_bytes, recovery_memory_bytes
from quantkit.quantization.recipe import Recipe, Rule
from quantkit.quantization.recovery import check_recovery, find_recovery
from quantkit.quantization.specs import CalibrationSpec
from quantkit.quantization.transforms.base import resolve
from quantkit.sources.base import ModelSource, file_bytes
from quantkit.sources.causal_lm import ResolvedHeadSource
from quantkit.support.errors import RecipeError

SHOWN = 5
"""Refused layers that an error names."""
WRITING = "writing calibration text"
QUANTIZING = "quantizing layers"
ASSEMBLING = "assembling and rereading"
"""Phases of a run, as progress names them."""


@dataclass(frozen=True)
class Plan:
    """A recipe × a model.

    Attributes:
        recipe: the recipe as given; if a method needs calibration that the recipe doesn't describe, with
            the default :class:`~quantkit.quantization.specs.CalibrationSpec` filled in.
        rows: one a Linear, in the model's order; the embedding's comes first, if it is quantized.
        measured: the layers whose inputs are measured, by name, and the statistics that are wanted of them.
        drift: the names of the layers for which the original model's states are kept beside the quantized
            model's, to measure how far the two are apart. On random tokens that says nothing, and a
            transform changes what there is to compare.
        changes_layers: whether a transform changes a layer once all of it was measured.
        weighed: whether tokens get an importance: the recipe asks for it, and a method wants Hessians.
        other: the names of the other stored tensors, in order.
        other_bytes: bytes of those (an embedding that stays as it is, norms, biases).
        source_bytes: bytes of the model's files.
        disk_bytes: predicted size of the checkpoint's tensors.
        peak_bytes: predicted resident memory, see :func:`make_plan`.
        walks_bytes: bytes on disk while tokens get an importance, if they do.
        between_bytes: bytes of the hidden states between two layers, if anything is calibrated.
        recovery_disk_bytes: bytes on disk while scales and norms are trained, if they are.
    """

    recipe: Recipe
    rows: tuple[PlanRow, ...]
    measured: Mapping[str, frozenset[str]]
    drift: frozenset[str]
    changes_layers: bool
    weighed: bool
    other: tuple[str, ...] = field(repr=False)
    other_bytes: int
    source_bytes: int
    disk_bytes: int
    peak_bytes: int
    walks_bytes: int = 0
    between_bytes: int = 0
    recovery_disk_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that stays as it is: layers that no rule quantizes, embedding and head among them,
        norms and biases."""
        return self.other_bytes + sum(row.bytes_after for row in self.rows if row.method is None)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters; a kept bf16 layer counts as 16. The embedding
        isn't counted, quantized or not."""
        rows = [row for row in self.rows if row.name != EMBEDDING]
        weights = sum(row.shape[0] * row.shape[1] for row in rows)
        return 8 * sum(row.bytes_after for row in rows) / weights if weights else 0.0

    @property
    def linears(self) -> int:
        """How many Linears there are."""
        return sum(row.name != EMBEDDING for row in self.rows)

    @property
    def needed_disk_bytes(self) -> int:
        """Free space that a run needs: for the walks that weigh tokens, or for finished layers, the
        checkpoint and the states between two layers, or what a recovery keeps."""
        between = max(0, self.between_bytes - STATES_IN_MEMORY)
        return max(2 * self.disk_bytes + max(between, self.recovery_disk_bytes), self.walks_bytes)

    @property
    def calibrated(self) -> bool:
        """Whether any layer's method, or a transform, needs statistics of its inputs; or a recovery, text."""
        return bool(self.measured) or self.recipe.recover is not None

    @property
    def calibration(self) -> CalibrationSpec | None:
        """What layers are calibrated on; ``None`` if no method or transform needs any."""
        return self.recipe.calibration if self.measured else None

    @property
    def widest_hessian(self) -> int:
        """The number of inputs of the widest Linear that is solved by its Hessian; 0 if there is none."""
        return max((row.shape[1] for row in self.rows if row.name in self.measured and row.method
                    and "hessian" in registry("methods").get(row.method).needs), default=0)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a run, as progress counts them."""
        return run_phases(self.recipe, self.calibration, self.weighed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {"recipe": self.recipe.snapshot(), "rows": [row.to_dict() for row in self.rows],
                "source_bytes": self.source_bytes, "other_bytes": self.other_bytes,
                "kept_bytes": self.kept_bytes, "peak_bytes": self.peak_bytes,
                "disk_bytes": self.disk_bytes, "needed_disk_bytes": self.needed_disk_bytes,
                "bits_per_weight": self.bits_per_weight}


def run_phases(recipe: Recipe, calibration: CalibrationSpec | None, weighed: bool) -> tuple[str, ...]:
    """The phases of a run.

    Args:
        recipe: may have a recovery.
        calibration: the text that layers are calibrated on, if they are.
        weighed: whether the tokens of that are weighed.
    """
    recovery = find_recovery(recipe)
    return (*([WRITING] if calibration is not None and calibration.self_written else []),
            *([FORWARD, BACKWARD] if weighed else []), QUANTIZING,
            *(recovery.phases if recovery is not None else ()), ASSEMBLING)


def with_own_head(recipe: Recipe, source: ModelSource) -> ModelSource:
    """The source; if a rule with ``match: lm_head`` quantizes the head of a model that has it tied to its
    embedding, the model with a head of its own, whatever becomes of the embedding."""
    tied = parse_config(source.config(), source.tensors()).tie_word_embeddings
    return ResolvedHeadSource(source, tied=False) if tied and any(r.match == HEAD and r.method
                                                for r in recipe.rules) else source


def make_plan(recipe: Recipe, source: ModelSource) -> Plan:
    """Resolve ``recipe`` against the model of ``source``.

    Raises:
        RecipeError: a rule matches no layer, or any layer is refused; the first five refusals are
            shown with their remedies, and the count.
        UsageError: the recipe's KV setting can't be read.
        SourceError, UnsupportedModelError: the model couldn't be loaded, see
            :func:`~quantkit.models.loadable.check_loadable`; so its checkpoint couldn't be either.
    """
    if recipe.candidates:
        raise RecipeError(f"recipe {recipe.name!r} leaves a choice",
                          why=f"its {len(recipe.candidates)} candidates are for a budget to choose from",
                          next="--budget 4.25bpw, or a size such as --budget 5GB")
    _check_kv(recipe)
    infos = source.tensors()
    config = check_loadable(source.uri, source.config(), infos, source.side_files()).config
    slots = all_slots(config)
    chosen = assign(recipe, slots)
    if chosen[0] is None or recipe.rules[chosen[0]].method is None:  # it is one of the other tensors
        slots, chosen = slots[1:], chosen[1:]
    resolver = RowResolver(recipe)
    rows, refused = [], []
    for slot, index in zip(slots, chosen, strict=True):
        try:
            rows.append(resolver.row(slot, index, infos))
        except LayerRefusal as refusal:
            refused.append((slot.name, str(refusal)))
    if refused:
        raise _unfit(recipe, source.uri, refused, len(slots))
    _check_alone(recipe, rows, resolver)
    _check_transforms(recipe, rows)
    linear = {f"{slot.name}.weight" for slot in slots}
    other = tuple(name for name in infos if name not in linear)
    other_bytes = sum(infos[name].nbytes for name in other)
    measured = _measured(recipe, rows)
    if (measured or recipe.recover) and recipe.calibration is None:
        recipe = recipe.model_copy(update={"calibration": CalibrationSpec()})
    check_recovery(recipe, rows, config)
    calibration = recipe.calibration if measured else None
    changed = any(transform.layer for transform, _ in resolve(recipe.transforms))
    drift = _drift(recipe, measured, changed)
    hessians = {name for name, wanted in measured.items() if "hessian" in wanted}
    weighed = calibration is not None and calibration.importance == "gradient" and bool(hessians)
    walks = between = 0
    if calibration is not None:
        between = states_bytes(config, calibration.windows * calibration.window,
                               changed or measured.keys() <= {EMBEDDING, HEAD}, bool(drift))
        if weighed:
            windows = min(calibration.windows, calibration.importance_windows)
            walks = walks_bytes(config, windows * calibration.window, len(hessians))
    peak = peak_bytes(rows, hessians, calibration, weighed, config, other, infos, changed, drift)
    recovery = 0
    if recipe.recover is not None and recipe.calibration is not None:
        size = recipe.recover.windows, recipe.calibration.window
        peak = max(peak, recovery_memory_bytes(rows, config, infos, *size))
        recovery = recovery_disk_bytes(rows, config, *size)
    return Plan(recipe, tuple(rows), measured, drift, changed, weighed, other, other_bytes,
                source_bytes=file_bytes(source),
                disk_bytes=other_bytes + sum(row.bytes_after for row in rows), peak_bytes=peak,
                walks_bytes=walks, between_bytes=between, recovery_disk_bytes=recovery)


def _measured(recipe: Recipe, rows: Iterable[PlanRow]) -> dict[str, frozenset[str]]:
    methods, every = registry("methods"), frozenset[str]()
    for transform, _ in resolve(recipe.transforms):
        every |= transform.needs
    wanted = {row.name: methods.get(row.method).asked(row.options) | _inputs(row)
              | (every if row.layer is not None else frozenset()) for row in rows if row.method}
    return {name: needs for name, needs in wanted.items() if needs}


def _inputs(row: PlanRow) -> frozenset[str]:
    """What is measured for a row whatever its method."""
    return frozenset({"largest"} if row.spec is not None and row.spec.static_inputs else ())


def _drift(recipe: Recipe, needs: Mapping[str, frozenset[str]], changed: bool) -> frozenset[str]:
    """The Linears whose inputs' drift is measured: not the head, nor those of a layer's last stage."""
    if changed or (recipe.calibration is not None and recipe.calibration.text == "random"):
        return frozenset()
    return frozenset(name for name, wanted in needs.items()
                     if "drift" in wanted and name not in (EMBEDDING, HEAD)
                     and EXPERT not in name and not name.endswith("down_proj"))


def candidate_rows(recipe: Recipe, source: ModelSource) -> dict[str, dict[int, PlanRow]]:
    """What each candidate would make of each Linear that no rule takes: by full name, then by the candidate's
    number, those that fit.

    Raises:
        RecipeError: no candidate fits some layer.
    """
    slots, infos = linear_slots(parse_config(source.config())), source.tensors()
    rules = tuple(Rule(match="*", **dict(candidate)) for candidate in recipe.candidates)
    resolver = RowResolver(recipe.model_copy(update={"rules": rules}))
    rows_by_name: dict[str, dict[int, PlanRow]] = {}
    refused = []
    for slot in slots:
        if any(rule.matches(slot.name) for rule in recipe.rules):
            continue
        rows, whys = {}, []
        for index in range(len(rules)):
            try:
                rows[index] = resolver.row(slot, index, infos)
            except LayerRefusal as refusal:
                whys.append(f"{recipe.candidates[index].label()}: {refusal}")
        rows_by_name[slot.name] = rows
        if not rows:
            refused.append((slot.name, "no candidate fits: " + "; ".join(whys)))
    if refused:
        raise _unfit(recipe, source.uri, refused, len(slots))
    return rows_by_name


def _check_kv(recipe: Recipe) -> None:
    """Raise UsageError if the KV setting can't be read, or names what isn't installed."""
    if recipe.kv is not None:
        spec = parse_kv(recipe.kv)
        build_policy(spec)
        build_kv_codecs(spec)


def _check_alone(recipe: Recipe, rows: list[PlanRow], resolver: RowResolver) -> None:
    """RecipeError if a layer's format wants all others to be like it, and one isn't."""
    packed = [row for row in rows if row.spec is not None]
    for row in packed:
        if not getattr(resolver.formats.get(cast(str, row.format)), "alone", False):
            continue
        other = next((o for o in packed if (o.format, o.spec, o.dtype) != (row.format, row.spec, row.dtype)),
                     None)
        if other is not None:
            specs = [f"{quantized.name}: {quantized.format} {quantized.spec.label()}"
                     for quantized in (row, other) if quantized.spec]
            raise RecipeError(f"recipe {recipe.name!r} makes what no quantization_config can say",
                              why=f"format {row.format} has place for one spec, and here are two:\n"
                                  + "\n".join(specs),
                              next=f"give every rule format {row.format} and one spec (or method: null), "
                                   "or leave out 'format': pack-quantized can say a mix of integers")


def _check_transforms(recipe: Recipe, rows: list[PlanRow]) -> None:
    """RecipeError if a transform has nothing to do for any of the layers."""
    specs = dict.fromkeys(row.spec for row in rows if row.layer is not None and row.spec is not None)
    for transform, _ in resolve(recipe.transforms):
        whys = [transform.idle(spec) for spec in specs]
        if whys and whys[0] is not None and None not in whys:
            raise RecipeError(f"transform {transform.name} would change nothing", why=whys[0],
                              next="leave it out of the recipe")


def _unfit(recipe: Recipe, uri: str, refused: list[tuple[str, str]], total: int) -> RecipeError:
    lines = [f"{name}: {why}" for name, why in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines.append(f"and {len(refused) - SHOWN} more")
    return RecipeError(f"recipe {recipe.name!r} doesn't fit {uri}: "
                       f"{len(refused)} of {total} layers are refused",
                       why="\n".join(lines),
                       next="change the recipe as said, or keep such layers with a rule "
                            "{match: NAME, method: null} before the others")
