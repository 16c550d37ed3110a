"""What a method is. A new one is a function and one :class:`Method` value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.manager import describe_entry
from quantkit.plugins.registry import a_type
from quantkit.support.errors import PluginError, RecipeError, did_you_mean


class MethodOptions(BaseModel):
    """Base of a method's own options; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class LayerStats:
    """What calibration measured at a Linear's input.

    Attributes:
        tokens: the number of rows that went in; 0 for an expert that got none, whose Hessian is zeros.
        hessian: float32 ``[in, in]``, mean of ``x xᵀ`` over tokens, each weighted by what it matters to
            the Linears that read it if the recipe's calibration says so; if a method asked for it.
        largest: float32 ``[in]``, each input's largest ``|x|`` over all tokens, if a method asked for any.
        notes: fallbacks taken while measuring, a sentence each.
        drift: float32 ``[in, in]``, mean of ``(x̂ − x) xᵀ`` over tokens, weighted as in ``hessian``, with
            ``x̂`` what enters the Linear in the original model, if a method asked for it and it is known.
    """

    tokens: int
    hessian: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
    drift: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where they are: there a Linear is solved, too."""
        tensors = (self.hessian, self.largest, self.drift)
        return next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))

    def to(self, device: torch.device) -> LayerStats:
        """The same on another device."""
        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return self if self.device == device else dataclasses.replace(
            self, hessian=moved(self.hessian), largest=moved(self.largest), drift=moved(self.drift))


@dataclass(frozen=True)
class Method:
    """A registered weight quantizer.

    Attributes:
        name: its name in recipes.
        paper: link to the paper (or the page that stands for one).
        quantize: ``(weight float32 [out, in], stats or None, spec, options) → Codes``. Pure: it
            writes to none of its arguments and reads no file, clock or global generator.
        needs: statistics it must be given: ``"hessian"``, ``"largest"`` or nothing (data-free); and
            ``"drift"``, which it is given where it can be measured. An option ``drift`` that is 0 says that
            it isn't needed.
        options: its options' model.
        kinds: the :attr:`QuantSpec.grid <quantkit.formats.spec.QuantSpec.grid>` values it can produce.
        check: further limits on a spec, as the reason or ``None``.
        quick: options with which it takes less time and comes to nearly the same loss: what a choice between
            specs is measured with.
        quantize_batch: ``quantize`` for lists of weights of one shape and of their statistics → a list, if
            that is quicker than one after the other.
    """

    name: str
    paper: str
    quantize: Callable[[torch.Tensor, LayerStats | None, QuantSpec, MethodOptions], Codes]
    needs: frozenset[str] = frozenset()
    options: type[MethodOptions] = MethodOptions
    kinds: frozenset[str] = frozenset({"int"})
    check: Callable[[QuantSpec], str | None] = lambda spec: None
    quick: Mapping[str, Any] = field(default_factory=dict)
    quantize_batch: Callable[[Sequence[torch.Tensor], Sequence[LayerStats | None], QuantSpec, MethodOptions],
                             list[Codes]] | None = None

    def asked(self, options: Mapping[str, Any]) -> frozenset[str]:
        """:attr:`needs` with these options, filled in: without ``drift`` if an option of that name is 0."""
        return self.needs - {"drift"} if options.get("drift", 1) == 0 else self.needs

    def reason_against(self, spec: QuantSpec) -> str | None:
        """Why this method can't produce ``spec``; ``None`` if it can."""
        if spec.grid not in self.kinds:
            return f"{self.name} produces {' or '.join(sorted(self.kinds))}, not {spec.grid}"
        return self.check(spec)

    def run(self, weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
            options: MethodOptions) -> Codes:
        """:attr:`quantize` with its contract checked. Raises PluginError if the method breaks it."""
        try:
            codes = self.quantize(weight, stats, spec, options)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # of its own code
            raise self._broken(f"can't be called: {error}",
                               "quantize takes (weight, stats, spec, options)") from error
        return self._checked(codes, weight, spec)

    def run_batch(self, weights: Sequence[torch.Tensor], stats: Sequence[LayerStats | None],
                  spec: QuantSpec, options: MethodOptions) -> list[Codes]:
        """The same for several weights of one shape, in whatever way the method does that."""
        if self.quantize_batch is None or len(weights) == 1:
            return [self.run(weight, stat, spec, options) for weight, stat in zip(weights, stats,
                                                                                  strict=True)]
        results = self.quantize_batch(weights, stats, spec, options)
        if not isinstance(results, list) or len(results) != len(weights):
            size = f" of {len(results)}" if isinstance(results, list) else ""
            raise self._broken(f"quantize_batch returned a {type(results).__name__}{size}",
                               f"it must return a list of Codes, one for each of the {len(weights)} weights")
        return [self._checked(codes, weight, spec) for codes, weight in zip(results, weights, strict=True)]

    def _checked(self, codes: Codes, weight: torch.Tensor, spec: QuantSpec) -> Codes:
        if (fault := _reason_against_codes(codes, (weight.shape[0], weight.shape[1]), spec)) is not None:
            raise self._broken(f"returned {fault}", f"it was asked for Codes of {list(weight.shape)} as "
                                                    f"{spec.label()} with scales in {spec.scale_dtype}")
        return codes

    def _broken(self, what: str, why: str) -> PluginError:
        return PluginError(f"{describe_entry('methods', self.name)} {what}", why=why,
                           next="correct the method: quantkit.testing.check_method finds such errors")


def _reason_against_codes(codes: object, shape: tuple[int, int], spec: QuantSpec) -> str | None:
    """What is wrong with what a method returned; ``None`` if nothing."""
    if not isinstance(codes, Codes):
        return f"{a_type(codes)} in place of Codes"
    wanted = spec if spec.scale_dtype != "model" else spec.model_copy(
        update={"scale_dtype": codes.spec.scale_dtype})  # it may say which
    if codes.spec != wanted:
        return f"codes of another spec, {codes.spec.label()} with scales in {codes.spec.scale_dtype}"
    if not isinstance(codes.notes, tuple) or not all(isinstance(note, str) for note in codes.notes):
        return f"notes that are no tuple of strings: {codes.notes!r:.80}"
    fault = codes.fault(shape)
    return fault and f"codes that can't be stored: {fault}"


def options_type(method: Method) -> type[MethodOptions]:
    """:attr:`Method.options`. Raises PluginError if that is no model of options."""
    if isinstance(method.options, type) and issubclass(method.options, MethodOptions):
        return method.options
    raise PluginError(f"{describe_entry('methods', method.name)} has options of {method.options!r:.60}",
                      why="they are a subclass of MethodOptions",
                      next="correct the method: quantkit.testing.check_method finds such errors")


def checked_options(owner: str, options: type[MethodOptions], values: Mapping[str, Any]) -> MethodOptions:
    """``values`` as ``options``. Raises RecipeError for an option that ``owner``, such as ``transform awq``,
    doesn't have, and for a value that it can't take."""
    try:
        return options.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        extra = fault["type"] == "extra_forbidden"
        why = did_you_mean(key, options.model_fields) if extra else fault["msg"]
        raise RecipeError(f"{owner} can't take option {key!r}", why=why,
                          next="quantkit plugins list") from None


def row_parts(weight: torch.Tensor, spec: QuantSpec, values: int, multiple: int = 1) -> list[slice]:
    """Rows that are worked on together, a multiple of some number and about ``values`` weights, so that there
    are copies of few at a time; all of them where they share a scale, and squares whole."""
    if spec.granularity.strategy == "tile":
        multiple = spec.granularity.size or 1
    rows, step = weight.shape[0], max(1, values // (weight.shape[1] * multiple)) * multiple
    if spec.granularity.strategy == "tensor" or step >= rows:
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, rows, step)]
