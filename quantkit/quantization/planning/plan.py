"""Resolves a recipe against one model: one row per layer, with exact bytes and predicted peaks.

Everything that could fail later because of a spec, an option or a shape fails here, before any work
and for all layers at once. :func:`make_plan` reads no weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from quantkit.checkpoint.manifest import OutlineRecord
from quantkit.checkpoint.quantization_config import NF4
from quantkit.formats.base import Format
from quantkit.formats.dtypes import FLOATS, dtype_name, resolve
from quantkit.formats.spec import QuantSpec
from quantkit.kv.build import check_kv
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LinearSlot,
)
from quantkit.models.loadable import check_loadable
from quantkit.models.modules import library
from quantkit.models.outline import Outline, is_known, outline_of_config, outline_of_tensors
from quantkit.ops import packing
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.importance import BACKWARD, FORWARD
from quantkit.quantization.calibration.module_blocks import check_modules
from quantkit.quantization.memory import (
    STATES_IN_MEMORY,
    PlanRow,
    modules_peak_bytes,
    modules_states_bytes,
    peak_bytes,
    recovery_disk_bytes,
    recovery_memory_bytes,
    states_bytes,
    walks_bytes,
)
from quantkit.quantization.methods.base import Method, options_type
from quantkit.quantization.planning.engine import (
    RUN_ELSEWHERE,
    reason_against_family,
    reason_against_rows,
    reason_against_tower,
    refuse,
    unknown_family,
    variants,
)
from quantkit.quantization.recipe import CalibrationSpec, Recipe, Rule, spec_of
from quantkit.quantization.recovery import check_recovery, find_recovery
from quantkit.quantization.transforms.base import resolve_transforms
from quantkit.sources.base import ModelSource, OuterModel, TensorInfo, file_bytes, outer_of
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, UsageError, did_you_mean, nearest

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
            the default :class:`~quantkit.quantization.recipe.CalibrationSpec` filled in.
        rows: one a Linear, in the model's order; the embedding's comes first, if it is quantized.
        measured: the layers whose inputs are measured, by name, and the statistics that are wanted of them.
        drift: the names of the layers for which the original model's states are kept beside the quantized
            model's, to measure how far the two are apart. On random tokens that says nothing, and a
            transform changes what there is to compare.
        has_layer_transforms: whether a transform changes a layer once all of it was measured.
        weighed: whether tokens get an importance: the recipe asks for it, and a method wants Hessians.
        other: the names of the other stored tensors, in order.
        other_bytes: bytes of those (an embedding that stays as it is, norms, biases).
        source_bytes: bytes of the model's files.
        disk_bytes: predicted size of the checkpoint's tensors.
        peak_bytes: predicted resident memory, see :func:`make_plan`.
        walks_bytes: bytes on disk while tokens get an importance, if they do.
        between_bytes: bytes of the hidden states between two layers, if anything is calibrated.
        recovery_disk_bytes: bytes on disk while scales and norms are trained, if they are.
        outline: of the model; what of it isn't quantized, and why, if its family isn't known.
        outer: the model of images and text that it is a part of, if it is; all of that is kept.
    """

    recipe: Recipe
    rows: tuple[PlanRow, ...]
    measured: Mapping[str, frozenset[str]]
    drift: frozenset[str]
    has_layer_transforms: bool
    weighed: bool
    other: tuple[str, ...] = field(repr=False)
    other_bytes: int
    source_bytes: int
    disk_bytes: int
    peak_bytes: int
    walks_bytes: int = 0
    between_bytes: int = 0
    recovery_disk_bytes: int = 0
    outline: Outline | None = field(default=None, repr=False, compare=False)
    outer: OuterModel | None = field(default=None, repr=False, compare=False)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that stays as it is: layers that no rule quantizes, embedding and head among them,
        norms and biases."""
        return self.other_bytes + sum(row.bytes_after for row in self.rows if row.method is None)

    @property
    def through_modules(self) -> bool:
        """Whether layers are measured as transformers' modules, since their mathematics isn't known here."""
        return bool(self.measured) and self.outline is not None and self.outline.config is None

    @property
    def outline_record(self) -> OutlineRecord | None:
        """What the manifest says of a model whose family isn't known."""
        if self.outline is None or self.outline.config is not None:
            return None
        kept = Counter(self.outline.kept)
        for row in self.rows:
            if row.method is None:
                kept[row.why or "no rule is for it"] += row.shape[0] * row.shape[1]
        quantized = sum(row.shape[0] * row.shape[1] for row in self.rows if row.method)
        readers = tuple(engine for engine in ("vllm", "transformers")
                        if reason_against_family(engine, self.rows, self.outline.model_type) is None)
        return OutlineRecord(model_type=self.outline.model_type, layer_prefix=self.outline.layer_prefix,
                             quantized=quantized, kept=dict(kept.most_common()),
                             calibrated=library() if self.through_modules else None,
                             engines=readers)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters; a kept bf16 layer counts as 16. The embedding
        isn't counted, quantized or not."""
        rows = [row for row in self.rows if row.name != EMBEDDING]
        weights = sum(row.shape[0] * row.shape[1] for row in rows)
        return 8 * sum(row.bytes_after for row in rows) / weights if weights else 0.0

    @property
    def linears(self) -> int:
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


def make_plan(recipe: Recipe, source: ModelSource) -> Plan:
    """Resolve ``recipe`` against the model of ``source``.

    Of a recipe for another engine it is the plan of the smallest variant that this engine loads.

    Raises:
        RecipeError: a rule matches no layer, or any layer is refused; the first five refusals are
            shown with their remedies, and the count. Or the recipe's engine loads no variant of it.
        UsageError: the recipe's KV setting can't be read.
        SourceError, UnsupportedModelError: the model couldn't be loaded, see
            :func:`~quantkit.models.loadable.check_loadable`; so its checkpoint couldn't be either.
    """
    if recipe.candidates:
        raise RecipeError(f"recipe {recipe.name!r} leaves a choice",
                          why=f"its {len(recipe.candidates)} candidates are for a budget to choose from",
                          next="--budget 4.25bpw, or a size such as --budget 5GB")
    if recipe.kv is not None:
        check_kv(parse_kv(recipe.kv))
    return _plan_for_engine(recipe, source, checked_outline(source))


def plans_for_engines(recipe: Recipe, source: ModelSource, engines: Iterable[str]) -> dict[str, Plan]:
    """By engine, the smallest checkpoint of this recipe that it loads; those that load none are missing.

    Raises:
        QuantkitError: what :func:`make_plan` raises of the model itself.
    """
    outline, plans = checked_outline(source), {}
    for engine in engines:
        with suppress(RecipeError):
            plans[engine] = _plan_for_engine(recipe.model_copy(update={"engine": engine}), source, outline)
    return plans


_CHECKED: WeakKeyDictionary[ModelSource, Outline] = WeakKeyDictionary()
"""Outlines of sources that were checked: many recipes are planned for a source, and its tokenizer takes long
to read."""


def checked_outline(source: ModelSource) -> Outline:
    """The outline of a model; of a known family, of one that could be loaded. Raises what :func:`make_plan`
    does of it."""
    if source not in _CHECKED:
        config, infos = source.config(), source.tensors()
        if is_known(config, infos):
            outline = outline_of_config(check_loadable(source.uri, config, infos, source.side_files()).config)
        else:
            outline = outline_of_tensors(source.uri, config, infos)
        _CHECKED[source] = outline
    return _CHECKED[source]


def _plan_for_engine(recipe: Recipe, source: ModelSource, outline: Outline) -> Plan:
    if outline.config is None:
        return _plan_without_config(recipe, source, outline)
    if recipe.engine == "quantkit":
        return _plan(recipe, source, outline)
    refusal: RecipeError | str | None = None
    for variant in variants(recipe):
        try:
            plan = _plan(variant, source, outline)
        except RecipeError as error:
            refusal = error
            continue
        refusal = reason_against_rows(recipe.engine, plan.rows, source.config())
        if refusal is None and plan.outer is not None and recipe.engine != "llama.cpp":
            refusal = reason_against_tower(recipe.engine, plan.rows, str(plan.outer.config["model_type"]))
        if refusal is None:
            return replace(plan, recipe=plan.recipe.model_copy(update={"engine": recipe.engine}))
    if isinstance(refusal, RecipeError):
        raise refusal
    refuse(recipe, str(refusal))


def _plan_without_config(recipe: Recipe, source: ModelSource, outline: Outline) -> Plan:
    """The plan for a model that only other engines run: embedding and head are what these load, plain."""
    nf4 = any(rule.format_name == NF4 for rule in recipe.rules)  # which transformers alone reads
    engine: str = recipe.engine if recipe.engine != "quantkit" else RUN_ELSEWHERE[-1 if nf4 else 0]
    if engine not in RUN_ELSEWHERE:
        raise unknown_family(recipe, outline.model_type,
                             f"{engine} gets only models whose mathematics is known here")
    plan = _plan(variants(recipe.model_copy(update={"engine": engine}))[-1], source, outline)
    why = reason_against_family(engine, plan.rows, outline.model_type)
    if why is None and plan.calibration is not None and plan.calibration.self_written:
        why = "the model would have to write text, and isn't run here"
    if why is not None:
        raise unknown_family(recipe, outline.model_type, why)
    if plan.measured:
        check_modules(source, outline)
    return replace(plan, recipe=plan.recipe.model_copy(update={"engine": recipe.engine}))


def _plan(recipe: Recipe, source: ModelSource, outline: Outline) -> Plan:
    infos, slots, config = source.tensors(), outline.slots, outline.config
    chosen = assign(recipe, slots, outline.tied, outline.rule_name)
    if slots[0].name == EMBEDDING and (chosen[0] is None or recipe.rules[chosen[0]].method is None):
        slots, chosen = slots[1:], chosen[1:]  # it is one of the other tensors
    resolver = RowResolver(recipe)
    rows, refused = list[PlanRow](), []
    for slot, index in zip(slots, chosen, strict=True):
        try:
            rows.append(resolver.row(slot, index, infos))
        except LayerRefusal as refusal:
            refused.append((slot.name, str(refusal)))
            if config is None:
                rows.append(replace(resolver.row(slot, None, infos), why=str(refusal)))
    if refused and (config is not None or all(row.why for row in rows)):
        raise _unfit(recipe, source.uri, refused, len(slots))
    _check_alone(recipe, rows, resolver)
    _check_transforms(recipe, rows)
    linear = {f"{slot.name}.weight" for slot in slots}
    other = tuple(name for name in infos if name not in linear)
    other_bytes = sum(infos[name].nbytes for name in other)
    measured = _measured(recipe, rows)
    if (measured or recipe.recover) and recipe.calibration is None:
        recipe = recipe.model_copy(update={"calibration": CalibrationSpec()})
    if config is not None:
        check_recovery(recipe, rows, config)
    calibration = recipe.calibration if measured else None
    changed = any(transform.layer for transform, _ in resolve_transforms(recipe.transforms))
    drift = _drift(recipe, measured, changed)
    hessians = {name for name, wanted in measured.items() if "hessian" in wanted}
    weighed = bool(calibration is not None and calibration.importance == "gradient" and hessians
                   and config is not None)
    walks = between = 0
    if calibration is not None and config is not None:
        between = states_bytes(config, calibration.windows * calibration.window,
                               changed or measured.keys() <= {EMBEDDING, HEAD}, bool(drift))
        if weighed:
            windows = min(calibration.windows, calibration.importance_windows)
            walks = walks_bytes(config, windows * calibration.window, len(hessians))
    peak = peak_bytes(rows, hessians, calibration, weighed, config, other, infos, changed, drift)
    if calibration is not None and config is None:
        between = modules_states_bytes(rows, calibration, outline, drift)
        peak = modules_peak_bytes(rows, hessians, calibration, outline, other, infos, drift)
    recovery = 0
    if recipe.recover is not None and recipe.calibration is not None and config is not None:
        size = recipe.recover.windows, recipe.calibration.window
        peak = max(peak, recovery_memory_bytes(rows, config, infos, *size))
        recovery = recovery_disk_bytes(rows, config, *size)
    outer = outer_of(source)
    around = 0 if outer is None else outer.rest_bytes
    return Plan(recipe, tuple(rows), measured, drift, changed, weighed, other, other_bytes,
                source_bytes=file_bytes(source) + around, outline=outline, outer=outer,
                disk_bytes=other_bytes + sum(row.bytes_after for row in rows) + around, peak_bytes=peak,
                walks_bytes=walks, between_bytes=between, recovery_disk_bytes=recovery)


class LayerRefusal(Exception):
    """Why one layer can't be done as its rule says."""


def assign(recipe: Recipe, slots: Sequence[LinearSlot], tied: bool,
           rule_name: Callable[[str], str] = str) -> list[int | None]:
    """The index of the rule of every slot. ``tied``: whether the model's embedding is its head too;
    ``rule_name``: what rules call a layer. Raises RecipeError for a rule that applies to no layer."""
    names = [rule_name(slot.name) for slot in slots]
    count = 1 + max((slot.layer for slot in slots if slot.layer is not None), default=-1)
    chosen = [next((i for i, rule in enumerate(recipe.rules) if rule.matches(name, tied, count)), None)
              for name in names]
    for index, rule in enumerate(recipe.rules):
        if rule.optional or rule.tied not in (None, tied) or index in chosen:
            continue
        hits = [i for i, name in enumerate(names) if rule.matches(name, tied, count)]
        where = f"rule {index + 1} of recipe {recipe.name!r} (match {rule.match!r})"
        if hits:
            earlier = sorted({cast(int, chosen[i]) + 1 for i in hits})
            raise RecipeError(f"{where} is never reached",
                              why=f"rule {' and '.join(map(str, earlier))} before it already takes "
                                  f"every layer that it matches; the first match wins",
                              next=f"move the rule with match {rule.match!r} up")
        raise RecipeError(f"{where} matches no layer of the model",
                          why=_nearest_layers(rule.match, names),
                          next="correct its match, or write 'optional: true' beside it")
    return chosen


def _nearest_layers(match: str, names: Iterable[str]) -> str:
    """A sentence with the model's layers, their numbers replaced by ``*``: few enough to read."""
    known = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    ends = {name.rpartition(".")[2] for name in known}
    close = nearest(match.rpartition(".")[2], ends)
    return (f"did you mean '{'*.' if '.' in match else ''}{close}'? " if close else "") + (
        f"its layers: {', '.join(sorted(known))}")


class RowResolver:
    """Turns a slot and its rule into a row, or says why not."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.methods, self.formats = registry("methods"), registry("formats")
        self._options: dict[int, Mapping[str, Any] | LayerRefusal] = {}
        self._known: dict[Any, PlanRow] = {}  # of which a model has many

    def row(self, slot: LinearSlot, index: int | None, infos: Mapping[str, TensorInfo]) -> PlanRow:
        """``infos``: the model's tensors, known to be there and of the shapes that its config says."""
        rule = None if index is None else self.recipe.rules[index]
        known = infos[f"{slot.name}.weight"]
        if rule is None or rule.method is None or index is None:
            return _row(slot, known.nbytes, known.nbytes, str(known.dtype).removeprefix("torch."))
        key = index, slot.name == EMBEDDING, slot.out_features, slot.in_features, known.dtype
        if key not in self._known:
            self._known[key] = self._quantized(slot, index, rule, known)
        return replace(self._known[key], name=slot.name, layer=slot.layer, shares=slot.shares)

    def _quantized(self, slot: LinearSlot, index: int, rule: Rule, known: TensorInfo) -> PlanRow:
        shape = slot.out_features, slot.in_features
        assert rule.method is not None
        method: Method = self._get(self.methods, rule.method)
        spec = cast(QuantSpec, rule.spec)
        if (why := method.reason_against(spec)) is not None:
            raise LayerRefusal(why)
        format_name = cast(str, rule.format_name)
        form: Format = self._get(self.formats, format_name)
        if slot.name == EMBEDDING and (why := self._looked_up(slot, spec, method, form)) is not None:
            raise LayerRefusal(why)
        if (why := form.reason_against(spec, shape) or _divides(spec, shape)) is not None:
            if rule.fallback is not None and (other := spec_of(rule.fallback)) is not None:
                instead = rule.model_copy(update={"format": rule.fallback, "spec": other, "fallback": None})
                return self._quantized(slot, index, instead, known)
            raise LayerRefusal(why)
        options = self._checked_options(index, rule, method)
        if known.dtype not in FLOATS.values():
            raise LayerRefusal(f"its weight is stored as {known.dtype}; only "
                               f"{', '.join(FLOATS)} can be quantized: keep it with method: null")
        spec = resolve(spec, known.dtype, form)
        if (why := method.reason_against(spec)) is not None:
            raise LayerRefusal(why)
        try:
            layout = packing.layout(form, spec, shape, known.dtype)
        except PluginError:
            raise
        except QuantkitError as error:
            raise LayerRefusal("; ".join(filter(None, (error.why or error.what, error.next)))) from None
        after = sum(TensorInfo(n, size, dtype).nbytes for n, (dtype, size) in layout.items())
        return _row(slot, known.nbytes, after, dtype_name(known.dtype), rule.method, format_name, spec,
                    options)

    def _looked_up(self, slot: LinearSlot, spec: QuantSpec, method: Method, form: Format) -> str | None:
        """Why an embedding can't be so: its rows are looked up one by one, and multiplied only if it is the
        head too."""
        if method.needs and slot.shares != HEAD:
            free = [name for name, other in self.methods.usable() if not other.needs]
            return (f"{method.name} needs calibration, and an embedding with a head beside it is multiplied "
                    "with nothing that could be measured; give it a data-free method "
                    f"({', '.join(sorted(free))})")
        if spec.rotation or spec.activations:
            return ("rows of an embedding are looked up, not multiplied: it takes a spec without "
                    f"{'rotation' if spec.rotation else 'activations'}")
        if not hasattr(form, "rows"):
            able = [name for name, other in self.formats.usable() if hasattr(other, "rows")]
            return (f"format {form.name} can't give single rows; use one that can "
                    f"({', '.join(sorted(able))}), or keep the embedding")
        return None

    def _get(self, table: Any, name: str) -> Any:
        try:
            return table.get(name)
        except UsageError as error:  # no such name; that a plugin is broken isn't the layer's matter
            raise LayerRefusal(f"{error.what}; {error.why}") from None

    def _checked_options(self, index: int, rule: Rule, method: Method) -> Mapping[str, Any]:
        if index not in self._options:
            try:
                filled = options_type(method).model_validate(rule.options)
                self._options[index] = filled.model_dump(mode="json")
            except ValidationError as error:
                self._options[index] = LayerRefusal(_reason_against_options(method, error))
        options = self._options[index]
        if isinstance(options, LayerRefusal):
            raise options
        return options


def _row(slot: LinearSlot, before: int, after: int, dtype: str, method: str | None = None,
         form: str | None = None, spec: QuantSpec | None = None,
         options: Mapping[str, Any] | None = None) -> PlanRow:
    return PlanRow(slot.name, (slot.out_features, slot.in_features), slot.layer, slot.shares, method, form,
                   spec, options or {}, before, after, dtype)


def _reason_against_options(method: Method, error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"method {method.name} has no option {key!r}; {did_you_mean(key, method.options.model_fields)}"
    return f"option {key!r} of method {method.name}: {fault['msg']}"


def _divides(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    """The one law of groups, for formats of strangers that forget it."""
    size = spec.granularity.size
    if spec.granularity.strategy != "group" or not size or shape[1] % size == 0:
        return None
    fits = [s for s in (256, 128, 64, 32, 16, 8, 4, 2) if shape[1] % s == 0]
    return f"group size {size} doesn't divide in_features {shape[1]}; " + (
        f"use group size {fits[0]}, or strategy channel" if fits else "use strategy channel")


def _measured(recipe: Recipe, rows: Iterable[PlanRow]) -> dict[str, frozenset[str]]:
    methods, every = registry("methods"), frozenset[str]()
    for transform, _ in resolve_transforms(recipe.transforms):
        every |= transform.needs
    measured: dict[str, frozenset[str]] = {}
    for row in rows:
        if row.method:
            wanted = methods.get(row.method).asked(row.options) | (every if row.layer is not None else set())
            if row.spec is not None and row.spec.static_inputs:  # whatever its method
                wanted |= {"largest"}
            if wanted:
                measured[row.name] = wanted
    return measured


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
    outline, infos = checked_outline(source), source.tensors()
    slots = [slot for slot in outline.slots if slot.name != EMBEDDING]
    rules = tuple(Rule(match="*", **dict(candidate)) for candidate in recipe.candidates)
    resolver = RowResolver(recipe.model_copy(update={"rules": rules}))
    rows_by_name: dict[str, dict[int, PlanRow]] = {}
    refused = []
    for slot in slots:
        name = outline.rule_name(slot.name)
        if any(rule.matches(name, outline.tied, outline.num_layers) for rule in recipe.rules):
            continue
        rows, whys = {}, []
        for index in range(len(rules)):
            try:
                rows[index] = resolver.row(slot, index, infos)
            except LayerRefusal as refusal:
                whys.append(f"{recipe.candidates[index].label()}: {refusal}")
        if rows:
            rows_by_name[slot.name] = rows
        elif outline.config is not None:  # of another family it stays as it is
            refused.append((slot.name, "no candidate fits: " + "; ".join(whys)))
    if refused:
        raise _unfit(recipe, source.uri, refused, len(slots))
    return rows_by_name


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
    for transform, _ in resolve_transforms(recipe.transforms):
        whys = [transform.reason_against_spec(spec) for spec in specs]
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
