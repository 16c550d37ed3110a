"""Resolves a layer and its rule into a row of the plan, or says why that is impossible."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from pydantic import ValidationError

from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.base import Format
from quantkit.formats.dtypes import FLOATS, dtype_name, resolve
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD, LinearSlot
from quantkit.ops import packing
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import Method, options_type
from quantkit.quantization.recipe import Recipe, Rule, spec_of
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, UsageError, did_you_mean, nearest

BATCH = 1 << 22
"""Weights, and values of Hessians, of Linears that are solved together; larger ones are solved alone."""
PART = 1 << 26
"""Weights of a part of a Linear with very many rows, at most."""
PART_ROWS = 64
"""Rows of a part are a multiple of it, as a trellis's rings are."""
EMBEDDING_UNIT = "embedding"
REST_UNIT = "rest"
"""The units of a checkpoint that are in no decoder layer: a quantized embedding, and everything else."""


def layer_unit(index: int) -> str:
    """The unit of a decoder layer."""
    return f"layer-{index}"


@dataclass(frozen=True)
class PlanRow:
    """What happens to one layer.

    Attributes:
        name: full name, without ``.weight``.
        shape: its shape, ``(out, in)``.
        layer: index of its decoder layer; ``None`` outside.
        shares: layers of equal value see the same input and share statistics.
        method: a registered method; ``None`` keeps the layer as it is.
        format: a registered format; ``None`` for a kept layer.
        spec: with ``scale_dtype`` resolved; ``None`` for a kept layer.
        options: the method's options as plain data, defaults filled in.
        bytes_before: bytes of the weight in the source.
        bytes_after: bytes of all tensors that are stored for it; exact.
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

    def recorded(self, *, error: float | None = None, tokens: int | None = None,
                 notes: tuple[str, ...] = ()) -> LayerRow:
        """The row of a manifest, with what was measured."""
        return LayerRow(name=self.name, shape=self.shape, dtype=self.dtype, method=self.method,
                        format=self.format, spec=self.spec, options=dict(self.options), bits=self.bits,
                        bytes=self.bytes_after, error=error, tokens=tokens, notes=notes)

    @property
    def unit(self) -> str:
        """The unit that it is stored in: units are made one after another, each whole or not at all."""
        if self.layer is not None:
            return layer_unit(self.layer)
        return EMBEDDING_UNIT if self.name == EMBEDDING else REST_UNIT

    @property
    def bits(self) -> float:
        """Stored bits a weight, scales and zero points included."""
        return 8 * self.bytes_after / (self.shape[0] * self.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        spec = self.spec.model_dump(mode="json") if self.spec else None
        return {**asdict(self), "shape": list(self.shape), "spec": spec, "options": dict(self.options),
                "label": self.spec.label() if self.spec else None, "bits": self.bits}


def batch_groups(rows: Iterable[PlanRow], needs: Container[str], limit: int) -> list[tuple[PlanRow, ...]]:
    """Quantized Linears in the groups in which they are solved, each in the place of its first.

    Args:
        rows: the rows of one unit.
        needs: names of those whose methods need statistics.
        limit: weights, and values of Hessians, of a group that is more than one Linear.
    """
    groups: list[list[PlanRow]] = []
    open_groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.method is None:
            continue
        method: Method = registry("methods").get(row.method)
        alike = repr((row.shape, row.dtype, row.method, row.format, row.spec, sorted(row.options.items())))
        size = max(row.shape) * row.shape[1]
        if method.quantize_batch is None or row.name not in needs or 2 * size > limit:
            groups.append([row])
        elif alike in open_groups and (len(open_groups[alike]) + 1) * size <= limit:
            open_groups[alike].append(row)
        else:
            groups.append([row])
            open_groups[alike] = groups[-1]
    return [tuple(group) for group in groups]


def rows_at_once(spec: QuantSpec, shape: tuple[int, int]) -> int:
    """The number of rows in a part of a weight ``shape``: all if they fit into one part or share scales."""
    rows, columns = shape
    step = max(1, PART // (columns * PART_ROWS)) * PART_ROWS
    block = spec.granularity.size if spec.granularity.strategy == "block" else None
    indivisible = (spec.granularity.strategy in ("tensor", "tile") or spec.outer_shape(shape) == (1, 1)
                   or (block is not None and step * columns % block))
    return rows if indivisible else min(rows, step)


class LayerRefusal(Exception):
    """Why one layer can't be done as its rule says."""


def assign(recipe: Recipe, slots: Iterable[LinearSlot]) -> list[int | None]:
    """The index of the rule of every slot. Raises RecipeError for a rule that applies to no layer."""
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


class RowResolver:
    """Turns a slot and its rule into a row, or says why not."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.methods, self.formats = registry("methods"), registry("formats")
        self._options: dict[int, Mapping[str, Any] | LayerRefusal] = {}

    def row(self, slot: LinearSlot, index: int | None, infos: Mapping[str, TensorInfo]) -> PlanRow:
        """``infos``: the model's tensors, known to be there and of the shapes that its config says."""
        rule = None if index is None else self.recipe.rules[index]
        known = infos[f"{slot.name}.weight"]
        if rule is None or rule.method is None or index is None:
            return _row(slot, known.nbytes, known.nbytes, str(known.dtype).removeprefix("torch."))
        return self._quantized(slot, index, rule, known)

    def _quantized(self, slot: LinearSlot, index: int, rule: Rule, known: TensorInfo) -> PlanRow:
        shape = slot.out_features, slot.in_features
        assert rule.method is not None
        method: Method = self._get(self.methods, rule.method)
        spec = cast(QuantSpec, rule.spec)
        if (why := method.refuses(spec)) is not None:
            raise LayerRefusal(why)
        format_name = cast(str, rule.format_name)
        form: Format = self._get(self.formats, format_name)
        if slot.name == EMBEDDING and (why := self._looked_up(slot, spec, method, form)) is not None:
            raise LayerRefusal(why)
        if (why := form.refuses(spec, shape) or _divides(spec, shape)) is not None:
            if rule.fallback is not None and (other := spec_of(rule.fallback)) is not None:
                instead = rule.model_copy(update={"format": rule.fallback, "spec": other, "fallback": None})
                return self._quantized(slot, index, instead, known)
            raise LayerRefusal(why)
        options = self._checked_options(index, rule, method)
        if known.dtype not in FLOATS.values():
            raise LayerRefusal(f"its weight is stored as {known.dtype}; only "
                               f"{', '.join(FLOATS)} can be quantized: keep it with method: null")
        spec = resolve(spec, known.dtype, form)
        if (why := method.refuses(spec)) is not None:
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
                self._options[index] = LayerRefusal(_options_fault(method, error))
        options = self._options[index]
        if isinstance(options, LayerRefusal):
            raise options
        return options


def _row(slot: LinearSlot, before: int, after: int, dtype: str, method: str | None = None,
         form: str | None = None, spec: QuantSpec | None = None,
         options: Mapping[str, Any] | None = None) -> PlanRow:
    return PlanRow(slot.name, (slot.out_features, slot.in_features), slot.layer, slot.shares, method, form,
                   spec, options or {}, before, after, dtype)


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
