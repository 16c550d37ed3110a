"""A recipe resolved against one model: a row a layer, with exact bytes and predicted peaks.

Everything that could fail later because of a spec, an option or a shape fails here, before any work
and for all layers at once. :func:`make_plan` reads no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from quantkit.errors import QuantkitError, RecipeError, SourceError, did_you_mean, nearest
from quantkit.formats.base import Format
from quantkit.formats.dtypes import FLOATS, dtype_name, resolve
from quantkit.methods.base import Method
from quantkit.models.architecture import LinearSlot, linear_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.peak import STATES_IN_MEMORY, peak_bytes
from quantkit.plugins import registry
from quantkit.recipe import Recipe, Rule
from quantkit.sources.base import ModelSource, TensorInfo
from quantkit.sources.untied import Untied
from quantkit.spec import CalibrationSpec, QuantSpec

SHOWN = 5


@dataclass(frozen=True)
class PlanRow:
    """What happens to one layer.

    Attributes:
        name: full name, without ``.weight``.
        shape: ``(out, in)``.
        layer: index of its decoder layer; ``None`` outside.
        shares: layers of equal value see the same input and share statistics.
        method: a registered method; ``None`` keeps the layer as it is.
        format: a registered format; ``None`` for a kept layer.
        spec: with ``scale_dtype`` resolved; ``None`` for a kept layer.
        options: the method's options as plain data, defaults filled in.
        bytes_before: of the weight in the source.
        bytes_after: of all tensors that are stored for it; exact.
        dtype: the weight's dtype in the source, ``bfloat16``.
    """

    name: str
    shape: tuple[int, int]
    layer: int | None
    shares: str
    method: str | None
    format: str | None
    spec: QuantSpec | None
    options: Mapping[str, Any]
    bytes_before: int
    bytes_after: int
    dtype: str

    @property
    def bits(self) -> float:
        """Stored bits a weight, scales and zero points included."""
        return 8 * self.bytes_after / (self.shape[0] * self.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        spec = self.spec.model_dump(mode="json") if self.spec else None
        return {**asdict(self), "shape": list(self.shape), "spec": spec, "options": dict(self.options),
                "label": self.spec.label() if self.spec else None, "bits": self.bits}


@dataclass(frozen=True)
class Plan:
    """A recipe × a model.

    Attributes:
        recipe: as given; if a method needs calibration that the recipe doesn't describe, with
            the default :class:`~quantkit.spec.CalibrationSpec` filled in.
        rows: one a Linear, in the model's order.
        other_bytes: of all other stored tensors (embeddings, norms, biases).
        peak_bytes: predicted resident memory, see :func:`make_plan`.
        disk_bytes: predicted size of the checkpoint's tensors.
        states_bytes: of what enters all layers, if the calibration goes backward through the model.
        other: names of the other stored tensors, in order.
    """

    recipe: Recipe
    rows: tuple[PlanRow, ...]
    other_bytes: int
    peak_bytes: int
    disk_bytes: int
    states_bytes: int = 0
    other: tuple[str, ...] = field(default=(), repr=False)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters; a kept bf16 layer counts as 16."""
        weights = sum(row.shape[0] * row.shape[1] for row in self.rows)
        return 8 * sum(row.bytes_after for row in self.rows) / weights if weights else 0.0

    @property
    def needed_disk_bytes(self) -> int:
        """Free space that a run needs: for hidden states, then for finished layers and the checkpoint."""
        return max(2 * self.disk_bytes, self.states_bytes - STATES_IN_MEMORY)

    @property
    def calibrated(self) -> bool:
        """Whether any layer's method needs statistics of its inputs."""
        methods = registry("methods")
        return any(row.method and methods.get(row.method).needs for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {"recipe": self.recipe.snapshot(), "rows": [row.to_dict() for row in self.rows],
                "other_bytes": self.other_bytes, "peak_bytes": self.peak_bytes,
                "disk_bytes": self.disk_bytes, "needed_disk_bytes": self.needed_disk_bytes,
                "bits_per_weight": self.bits_per_weight}


def with_own_head(recipe: Recipe, source: ModelSource) -> ModelSource:
    """The source; if a rule with ``match: lm_head`` quantizes the head of a model that has it tied to its
    embedding, the model with a head of its own."""
    tied = parse_config(source.config()).tie_word_embeddings
    return Untied(source) if tied and any(r.match == "lm_head" and r.method for r in recipe.rules) else source


def make_plan(recipe: Recipe, source: ModelSource) -> Plan:
    """Resolve ``recipe`` against the model of ``source``.

    Raises:
        RecipeError: a rule matches no layer, or any layer is refused; the first five refusals are
            shown with their remedies, and the count.
        SourceError: another tensor that the architecture needs is missing or of another shape.
        UnsupportedModelError: the architecture isn't known.
    """
    config = parse_config(source.config())
    slots, infos = linear_slots(config), source.tensors()
    chosen = _assign(recipe, slots)
    _check_others(source.uri, config, {slot.name for slot in slots}, infos)
    resolver = _Resolver(recipe)
    rows, refused = [], []
    for slot, index in zip(slots, chosen, strict=True):
        try:
            rows.append(resolver.row(slot, index, infos))
        except _Refusal as refusal:
            refused.append((slot.name, str(refusal)))
    if refused:
        raise _unfit(recipe, source.uri, refused, len(slots))
    _check_alone(recipe, rows, resolver)
    linear = {f"{slot.name}.weight" for slot in slots}
    if config.tie_word_embeddings:
        linear.add("lm_head.weight")  # the embedding matrix itself; some files repeat it
    other = tuple(name for name in infos if name not in linear)
    other_bytes = sum(infos[name].nbytes for name in other)
    needs = {row.name for row in rows if row.method and resolver.methods.get(row.method).needs}
    if needs and recipe.calibration is None:
        recipe = recipe.model_copy(update={"calibration": CalibrationSpec()})
    disk = other_bytes + sum(row.bytes_after for row in rows)
    calibration = recipe.calibration if needs else None
    states = 0
    if calibration is not None and calibration.importance == "gradient":
        states = config.num_layers * calibration.samples * calibration.length * config.hidden_size * 4
    peak = peak_bytes(rows, needs, calibration, states, config, other, infos)
    return Plan(recipe, tuple(rows), other_bytes, peak, disk, states, other)


def _check_others(uri: str, config: ModelConfig, slots: set[str], infos: Mapping[str, TensorInfo]) -> None:
    faults = []
    for name, shape in tensor_shapes(config).items():
        if name.removesuffix(".weight") in slots:
            continue
        if (info := infos.get(name)) is None:
            faults.append(f"there is no {name}")
        elif tuple(info.shape) != shape:
            faults.append(f"{name} is {list(info.shape)}, not {list(shape)}")
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise SourceError(f"{uri} doesn't hold the model that its config.json describes",
                          why="\n".join(faults[:SHOWN] + more), next=f"quantkit inspect {uri}")


class _Refusal(Exception):
    """Why one layer can't be done as its rule says."""


def _assign(recipe: Recipe, slots: Iterable[LinearSlot]) -> list[int | None]:
    """For every slot the index of its rule. RecipeError for a rule that decides nothing."""
    names = [slot.name for slot in slots]
    chosen = [next((i for i, rule in enumerate(recipe.rules) if rule.matches(name)), None)
              for name in names]
    for index, rule in enumerate(recipe.rules):
        if rule.optional or index in chosen:
            continue
        hits = [i for i, name in enumerate(names) if rule.matches(name)]
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


class _Resolver:
    """Turns a slot and its rule into a row, or says why not."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.methods, self.formats = registry("methods"), registry("formats")
        self._options: dict[int, Mapping[str, Any] | _Refusal] = {}

    def row(self, slot: LinearSlot, index: int | None, infos: Mapping[str, TensorInfo]) -> PlanRow:
        rule = None if index is None else self.recipe.rules[index]
        info, shape = infos.get(f"{slot.name}.weight"), (slot.out_features, slot.in_features)

        def make(before: int, after: int, dtype: str, method: str | None = None, form: str | None = None,
                 spec: QuantSpec | None = None, options: Mapping[str, Any] | None = None) -> PlanRow:
            return PlanRow(slot.name, shape, slot.layer, slot.shares, method, form, spec, options or {},
                           before, after, dtype)

        if rule is None or rule.method is None or index is None:
            known = self._tensor(slot.name, info, shape)
            return make(known.nbytes, known.nbytes, str(known.dtype).removeprefix("torch."))
        method: Method = self._get(self.methods, rule.method)
        spec = cast(QuantSpec, rule.spec)
        if (why := method.refuses(spec)) is not None:
            raise _Refusal(why)
        if method.needs and slot.layer is None:
            free = [name for name in self.methods if not self._get(self.methods, name).needs]
            raise _Refusal(f"{method.name} needs calibration, which measures the inputs of decoder layers "
                           f"only; keep it with a rule {{match: {slot.name}, method: null}} before this one, "
                           f"or give it a data-free method ({', '.join(sorted(free))})")
        format_name = cast(str, rule.format_name)
        form: Format = self._get(self.formats, format_name)
        if (why := form.refuses(spec, shape) or _divides(spec, shape)) is not None:
            raise _Refusal(why)
        options = self._checked_options(index, rule, method)
        known = self._tensor(slot.name, info, shape)
        if known.dtype not in FLOATS.values():
            raise _Refusal(f"its weight is stored as {known.dtype}; only "
                           f"{', '.join(FLOATS)} can be quantized: keep it with method: null")
        spec = resolve(spec, known.dtype, form)
        if (why := method.refuses(spec)) is not None:
            raise _Refusal(why)
        try:
            layout = form.layout(spec, shape, known.dtype)
        except QuantkitError as error:
            raise _Refusal("; ".join(filter(None, (error.why or error.what, error.next)))) from None
        after = sum(TensorInfo(n, size, dtype).nbytes for n, (dtype, size) in layout.items())
        return make(known.nbytes, after, dtype_name(known.dtype), rule.method, format_name, spec, options)

    def _get(self, table: Any, name: str) -> Any:
        try:
            return table.get(name)
        except QuantkitError as error:
            raise _Refusal(f"{error.what}; {error.why}") from None

    def _checked_options(self, index: int, rule: Rule, method: Method) -> Mapping[str, Any]:
        if index not in self._options:
            try:
                filled = method.options.model_validate(rule.options)
                self._options[index] = filled.model_dump(mode="json")
            except ValidationError as error:
                self._options[index] = _Refusal(_options_fault(method, error))
        found = self._options[index]
        if isinstance(found, _Refusal):
            raise found
        return found

    @staticmethod
    def _tensor(name: str, info: TensorInfo | None, shape: tuple[int, int]) -> TensorInfo:
        if info is None:
            raise _Refusal(f"the model has no tensor {name}.weight")
        if tuple(info.shape) != shape:
            raise _Refusal(f"{name}.weight is {list(info.shape)} in the model's files, "
                           f"{list(shape)} by its config.json")
        return info


def _check_alone(recipe: Recipe, rows: list[PlanRow], resolver: _Resolver) -> None:
    """RecipeError if a layer's format wants all others to be like it, and one isn't."""
    packed = [row for row in rows if row.spec is not None]
    for row in packed:
        if not getattr(resolver.formats.get(cast(str, row.format)), "alone", False):
            continue
        other = next((o for o in packed if (o.format, o.spec, o.dtype) != (row.format, row.spec, row.dtype)),
                     None)
        if other is not None:
            said = [f"{one.name}: {one.format} {one.spec.label()}" for one in (row, other) if one.spec]
            raise RecipeError(f"recipe {recipe.name!r} makes what no quantization_config can say",
                              why=f"format {row.format} has place for one spec, and here are two:\n"
                                  + "\n".join(said),
                              next=f"give every rule format {row.format} and one spec (or method: null), "
                                   "or leave out 'format': pack-quantized can say a mix of integers")


def _options_fault(method: Method, error: ValidationError) -> str:
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


def _unfit(recipe: Recipe, uri: str, refused: list[tuple[str, str]], total: int) -> RecipeError:
    lines = [f"{name}: {why}" for name, why in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines.append(f"and {len(refused) - SHOWN} more")
    return RecipeError(f"recipe {recipe.name!r} doesn't fit {uri}: "
                       f"{len(refused)} of {total} layers are refused",
                       why="\n".join(lines),
                       next="change the recipe as said, or keep such layers with a rule "
                            "{match: NAME, method: null} before the others")
