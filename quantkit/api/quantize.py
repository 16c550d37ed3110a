"""Quantizes a model by a recipe, or to a size."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from quantkit.api.progress import Progress, reported
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import refuse_existing
from quantkit.executor.ray import check_executor
from quantkit.quantization import run
from quantkit.quantization.budget.amount import parse_budget
from quantkit.quantization.budget.choose import BudgetChoice, choose
from quantkit.quantization.budget.sensitivity import budget_phases
from quantkit.quantization.effort import Effort, with_effort
from quantkit.quantization.planning.plan import run_phases
from quantkit.quantization.recipe import CalibrationSpec, Recipe, load_recipe
from quantkit.quantization.solve import ModelOrigin
from quantkit.support.device import find_device
from quantkit.support.errors import UsageError
from quantkit.support.progress import Listener, between

MIXED = "mixed"
"""Whose candidates a budget chooses from, if nothing else is said."""
EngineName = Literal["quantkit", "vllm", "sglang", "transformers", "mlx", "llama.cpp"]


def quantize(model: str, recipe: str | Recipe | None = None, out: str | Path | None = None, *,
             budget: str | None = None, engine: EngineName | None = None, effort: Effort | None = None,
             calibration: str | Sequence[str] | None = None, windows: int | None = None,
             window: int | None = None, packing: Literal["auto", "stream", "documents"] | None = None,
             avoid: Sequence[str] = (), seed: int | None = None, device: str = "auto",
             executor: Literal["local", "ray"] = "local", strict: bool = False, revision: str | None = None,
             progress: Progress = True) -> Checkpoint:
    """Quantize a model into a checkpoint's folder.

    A run that was stopped goes on where it was, if it is called again with the same arguments.

    Args:
        model: a folder, a ``.gguf`` file, ``OWNER/NAME`` on the hub, ``pkg:NAME``.
        recipe: a recipe's name, a YAML file, or a recipe; with ``budget`` the one that lists the candidates.
        out: the folder to make; nothing may be there.
        budget: a size, ``4.25bpw`` (stored bits a weight of all Linears) or ``5GB`` (all tensors): what each
            layer costs at each width is measured, and the best that fits is taken.
        engine: what must load the checkpoint, if not quantkit alone: layers get its layouts, and what it
            reads only plain stays 16-bit.
        effort: how much time it may take: ``fast``, ``default``, ``best``. The effort of a ``Recipe`` that
            is given is one that was resolved, as ``load_recipe`` does.
        calibration: texts to calibrate on, in place of the recipe's: files, folders, ``hub:OWNER/NAME``,
            ``builtin``, ``self``, ``random``.
        windows: the number of calibration windows; this and the next four are by default as the recipe says.
        window: tokens a window.
        packing: how texts become windows, as ``CalibrationSpec`` says.
        avoid: texts that no window may share passages with, because they will measure the result.
        seed: chooses the windows where there are more than needed.
        device: where calibrated recipes compute: ``cpu``, ``cuda``; ``auto`` takes a GPU if there is one.
        executor: solves the Linears in this process, or on a Ray cluster.
        strict: a fallback is an error.
        revision: branch, tag or commit of a model on the hub.
        progress: whether a bar is shown, or a callback.

    Returns:
        The checkpoint; its ``layers`` say what became of each Linear.

    Warns:
        UserWarning: of each fallback that a layer took, and of options without effect.

    Raises:
        UsageError: neither a recipe nor a budget is given, or no folder, or an argument is out of range.
        QuantkitError: whatever is wrong with model, recipe, texts, disk or values. What can be known in
            advance is found before any work.
        Stopped: interrupted; finished layers are kept.

    >>> checkpoint = quantkit.quantize("smollm2", "int8", "smollm2-int8", progress=False)
    >>> layer = checkpoint.layers[1]
    >>> layer.name, layer.method, round(layer.bits, 2), layer.error < 0.01
    ('model.layers.0.self_attn.q_proj', 'rtn', 8.03, True)
    """
    if out is None:
        raise UsageError("no folder is given", why="the checkpoint needs one",
                         next='quantkit.quantize(model, recipe, "OUT")')
    changes = calibration_changes(calibration, windows=windows, window=window, packing=packing, avoid=avoid,
                                  seed=seed)
    order = order_of(model, recipe, budget=budget, engine=engine, effort=effort, changes=changes,
                     device=device, executor=executor, revision=revision)
    with reported(progress, f"{model} by {order.recipe.name}") as listener:
        choice = None
        if budget is not None:
            refuse_existing(out, model)
            order.check_machine()
            choice = order.choose(listener)
        result = order.run(out, choice, strict, listener)
    if order.calibration is not None and not result.plan.calibrated:
        warnings.warn(f"options of calibration have no effect: recipe {result.plan.recipe.name!r} calibrates "
                      "nothing", stacklevel=2)
    for text in result.fallbacks:
        warnings.warn(text, stacklevel=2)
    return Checkpoint.open(result.out)


@dataclass(frozen=True)
class QuantizeOrder:
    """What is to be quantized, and how; checked.

    Attributes:
        model, revision: the source.
        recipe: the recipe with all that was said besides.
        budget: the size that is aimed at, as text; ``None``: the recipe says all.
        device, executor: where it is done.
        calibration: what replaces the recipe's calibration; ``None``: nothing does.
    """

    model: str
    recipe: Recipe
    budget: str | None
    device: str
    executor: str
    revision: str | None
    calibration: CalibrationSpec | None

    def check_machine(self) -> None:
        """Before anything is measured. Raises UsageError, QuantkitError for what isn't here."""
        check_executor(self.executor, find_device(self.device))

    def choose(self, progress: Listener, alone: bool = False) -> BudgetChoice:
        """Measure what layers cost, and choose. ``alone``: nothing is quantized afterwards."""
        assert self.budget is not None
        budget = parse_budget(self.budget)
        with closing(ModelOrigin(self.model, self.revision, self.recipe).open()) as source:
            return choose(source, self.recipe, budget,
                          progress if alone else between(progress, 0, self._phases()))

    def run(self, out: str | Path, choice: BudgetChoice | None, strict: bool,
            progress: Listener) -> run.QuantizeResult:
        """Quantize, by ``choice`` if there was one. Errors as of :func:`quantize`."""
        if choice is not None:  # its phases come after those in which layers were measured
            total = self._phases()
            progress = between(progress, total - len(choice.plan.phases), total)
        return run.quantize(self.model, choice.recipe if choice else self.recipe, out, strict=strict,
                            revision=self.revision, progress=progress, executor=self.executor,
                            device=self.device)

    def _phases(self) -> int:
        """Of a run that measures, chooses and quantizes, if no phase turns out to be needless."""
        spec = self.recipe.calibration or CalibrationSpec()
        return len(budget_phases(spec)) + len(run_phases(self.recipe, spec, spec.importance == "gradient"))


def order_of(model: str, recipe: str | Recipe | None, *, budget: str | None, engine: EngineName | None,
             effort: Effort | None, changes: dict[str, Any], device: str, executor: str,
             revision: str | None) -> QuantizeOrder:
    """Check what can be checked without the model. Errors as of :func:`quantize`."""
    if recipe is None and budget is None:
        raise UsageError("neither a recipe nor a budget is given", why="one of them says how to quantize",
                         next="quantkit recipes list shows recipes; a budget is 4.25bpw or 5GB")
    if executor == "ray" and device == "auto":
        device = "cpu"  # where workers of a cluster compute
    find_device(device)
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe or MIXED, effort)
    elif effort is not None:
        recipe = with_effort(recipe, effort)
    if engine is not None:
        recipe = recipe.model_copy(update={"engine": engine})
    spec = None
    if changes:
        try:
            spec = CalibrationSpec(**(recipe.calibration or CalibrationSpec()).model_dump() | changes)
        except ValidationError as error:
            raise UsageError("invalid calibration options", next="give other windows, or leave them out",
                             why=error.errors()[-1]["msg"].removeprefix("Value error, ")) from None
        recipe = recipe.model_copy(update={"calibration": spec})
    return QuantizeOrder(model, recipe, budget, device, executor, revision, spec)


def calibration_changes(text: str | Sequence[str] | None, **others: Any) -> dict[str, Any]:
    """What is given of a :class:`~quantkit.quantization.recipe.CalibrationSpec`."""
    if text is not None and not isinstance(text, str):
        text = tuple(text) if len(text) > 1 else next(iter(text), None)
    avoid = others.get("avoid") or ()
    others["avoid"] = (avoid,) if isinstance(avoid, str) else tuple(avoid) or None
    given = {"text": text, **others}
    return {key: value for key, value in given.items() if value is not None}
