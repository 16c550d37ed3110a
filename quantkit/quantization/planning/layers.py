"""Resolves a layer and its rule into a row of the plan, or says why that is impossible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import ValidationError

from quantkit.formats.base import Format
from quantkit.formats.dtypes import FLOATS, dtype_name, resolve
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD, LinearSlot
from quantkit.ops import packing
from quantkit.plugins.manager import registry
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.methods.base import Method, options_type
from quantkit.quantization.recipe import Recipe, Rule, spec_of
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import PluginError, QuantkitError, RecipeError, UsageError, did_you_mean, nearest


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
