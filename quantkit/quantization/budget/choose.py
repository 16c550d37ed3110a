"""Chooses a candidate for each layer within a budget, as an ordinary recipe with its predicted loss.

The recipe's rules are few, readable and exact.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from quantkit.models.architecture import EMBEDDING, EXPERT
from quantkit.plugins.manager import registry
from quantkit.quantization.budget.amount import Budget
from quantkit.quantization.budget.sensitivity import MEASURING, Rows, sensitivities, weight_errors
from quantkit.quantization.planning.engine import RUN_ELSEWHERE, candidates_for
from quantkit.quantization.planning.plan import Plan, PlanRow, candidate_rows, checked_outline, make_plan
from quantkit.quantization.recipe import CalibrationSpec, Candidate, Recipe, Rule
from quantkit.quantization.recovery import check_recovery
from quantkit.sources.base import ModelSource
from quantkit.support.errors import RecipeError, UsageError
from quantkit.support.progress import Listener, Phases, silent


@dataclass(frozen=True)
class UniformCandidate:
    """One candidate in all layers that are free to choose.

    Attributes:
        label: the candidate's label.
        bits: stored bits a weight, over all Linears.
        disk_bytes: bytes of all the checkpoint's tensors.
        kl: predicted, nats a token; as :attr:`BudgetChoice.by_weights` says.
    """

    label: str
    bits: float
    disk_bytes: int
    kl: float


@dataclass(frozen=True)
class SharedChoice:
    """All layers that stand at the same place of a decoder layer and are stored alike: q, k and v, say.

    Attributes:
        names: theirs, without the number.
        bits: stored bits a weight.
        kl: predicted, nats a token.
        counts: by candidate's label, in how many decoder layers it was chosen.
    """

    names: tuple[str, ...]
    bits: float
    kl: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class BudgetChoice:
    """What fits a budget.

    Attributes:
        budget: the budget that was asked for.
        recipe: an ordinary one: the given rules, then one for each choice.
        plan: the plan of that recipe.
        candidates: the candidates that there were to choose from.
        chosen: by Linear, the candidate's number.
        costs: by Linear, then candidate: the KL that it should cause, nats a token.
        uniform: each candidate that fits all layers, alone; the smallest first.
        by_weights: costs aren't KL but ``‖ΔW‖² / ‖W‖²``: the model's mathematics isn't known.
    """

    budget: Budget
    recipe: Recipe
    plan: Plan
    candidates: tuple[Candidate, ...]
    chosen: Mapping[str, int]
    costs: Mapping[str, Mapping[int, float]]
    uniform: tuple[UniformCandidate, ...]
    by_weights: bool = False

    @property
    def kl(self) -> float:
        """Predicted for the whole model, nats a token: the sum over the Linears that were chosen for."""
        return math.fsum(self.costs[name][index] for name, index in self.chosen.items())

    def parts(self) -> list[SharedChoice]:
        """The choice by place, in the model's order."""
        rows = {row.name: row for row in self.plan.rows}
        places: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
        for names in _groups(rows[name] for name in self.chosen):
            places[tuple(dict.fromkeys(map(part_of, names)))].append(names)
        rows_of_layers, labels = [], labels_of(self.candidates)
        for place, groups in places.items():
            counts = [0] * len(self.candidates)
            for names in groups:
                counts[self.chosen[names[0]]] += 1
            flat = [rows[name] for names in groups for name in names]
            rows_of_layers.append(SharedChoice(place, _bits(flat, sum(row.bytes_after for row in flat)),
                                               math.fsum(self.costs[row.name][self.chosen[row.name]]
                                                         for row in flat),
                                               {labels[i]: n for i, n in enumerate(counts) if n}))
        return rows_of_layers

    def to_dict(self) -> dict[str, Any]:
        labels = labels_of(self.candidates)
        cost = "relative_error" if self.by_weights else "predicted_kl"
        return {"budget": self.budget.text, "bits_per_weight": self.plan.bits_per_weight,
                "tensor_bytes": self.plan.disk_bytes, cost: self.kl,
                "uniform": [{"label": uniform.label, "bits_per_weight": uniform.bits,
                             "tensor_bytes": uniform.disk_bytes, cost: uniform.kl}
                            for uniform in self.uniform],
                "layers": {name: {"chosen": labels[index], cost: {
                    labels[i]: kl for i, kl in self.costs[name].items()}}
                    for name, index in self.chosen.items()}}


def choose(source: ModelSource, recipe: Recipe, budget: Budget, progress: Listener = silent) -> BudgetChoice:
    """Give every layer that no rule takes one of the recipe's candidates, so that the divergence predicted
    for the whole is the least that fits.

    Layers that engines fuse (q, k and v; gate and up; all experts of a layer) get the same.

    Args:
        budget: for all Linears (``bpw``) or all tensors (bytes); what rules decide counts too.
        progress: called while sensitivities are measured.

    Raises:
        RecipeError: there are no candidates, they can't be compared or mixed, or none fits a layer.
        UsageError: the budget is smaller than the smallest choice, or larger than the largest.
        CalibrationError: the text is unusable, or a value isn't finite.
        Stopped: interrupted; what was measured is kept.
    """
    outline = checked_outline(source)
    if unknown := outline.config is None:
        recipe = recipe.model_copy(update={"candidates": candidates_for(recipe, RUN_ELSEWHERE[0])})
    _check(recipe)
    spec = recipe.calibration or CalibrationSpec()
    # codes alone decide what a layer costs: a recovery comes after the choice
    base = make_plan(recipe.model_copy(update={"calibration": spec, "candidates": (), "recover": None}),
                     source)
    rows = candidate_rows(recipe, source)
    if outline.config is not None:
        check_recovery(recipe.model_copy(update={"calibration": spec}),
                       [*base.rows, *(row for choices in rows.values() for row in choices.values())],
                       outline.config)
    if outside := next((name for name, choices in rows.items() if next(iter(choices.values())).layer is None),
                       None):
        raise RecipeError(f"recipe {recipe.name!r} has no rule for {outside}",
                          why="sensitivity is measured in decoder layers only",
                          next=f"add a rule {{match: {outside}, optional: true}}, which keeps it, or give "
                               "it a data-free method")
    linears = [row for row in base.rows if row.name != EMBEDDING]  # bits a weight are theirs
    other = base.other_bytes + sum(row.bytes_after for row in base.rows if row.name == EMBEDDING)
    fixed = [row for row in linears if row.name not in rows]
    if not rows:
        raise RecipeError(f"the rules of recipe {recipe.name!r} leave no layer to its candidates",
                          next=f"remove the rule with match {recipe.rules[-1].match!r}")
    _check_fixed(recipe, fixed)
    groups = _groups(row for row in base.rows if row.name in rows)
    options = [_common(names, rows, recipe) for names in groups]
    sizes = [[sum(rows[name][i].bytes_after for name in names) for i in options_of_group]
             for names, options_of_group in zip(groups, options)]
    taken = sum(row.bytes_after for row in fixed)
    limit = budget.linear_bytes(_weights(linears), other) - taken
    _check_range(budget, limit, linears, other, taken, sum(map(min, sizes)), sum(map(max, sizes)))

    costs = (weight_errors(source, rows, Phases(progress, (MEASURING,))(MEASURING)) if unknown else
             sensitivities(source, base, recipe.candidates, rows, progress))
    picked = allocate([[math.fsum(costs[name][i] for name in names) for i in options_of_group]
                       for names, options_of_group in zip(groups, options)], sizes, limit)
    assert picked is not None  # the range was checked
    chosen = {name: options_of_group[at] for names, options_of_group, at in zip(groups, options, picked)
              for name in names}
    kl = math.fsum(costs[name][index] for name, index in chosen.items())
    told = (f"Chosen for {budget.text} from the candidates of {recipe.name}; "
            + ("sum of relative squared errors" if unknown else "predicted KL") + f" {kl:.3g}.")
    named = {outline.rule_name(name): index for name, index in chosen.items()}
    resolved = recipe.model_copy(update={
        "description": told, "calibration": recipe.calibration, "candidates": (),
        "rules": recipe.rules + rules_of(named, recipe.candidates)})
    return BudgetChoice(budget, resolved, make_plan(resolved, source), recipe.candidates, chosen, costs,
                        _uniform(recipe, linears, other, rows, costs, taken), unknown)


def labels_of(candidates: Sequence[Candidate]) -> list[str]:
    """What each is called: by its spec, by its method too where that is another's, by a number too where
    only options differ."""
    specs = [candidate.label() for candidate in candidates]
    alike = Counter(specs)
    names = [f"{candidate.method} {spec}" if alike[spec] > 1 else spec
             for candidate, spec in zip(candidates, specs, strict=True)]
    alike = Counter(names)
    return [f"{name} #{number}" if alike[name] > 1 else name for number, name in enumerate(names, 1)]


def _check(recipe: Recipe) -> None:
    """RecipeError for candidates that can't be chosen from."""
    if not recipe.candidates:
        raise RecipeError(f"recipe {recipe.name!r} has no candidates",
                          why="its rules leave a budget no choice",
                          next="leave out --recipe, or add a section 'candidates' to it (docs/budget.md)")
    if recipe.engine != "quantkit":
        raise RecipeError(f"recipe {recipe.name!r} is for {recipe.engine} and leaves a choice to a budget",
                          why="layouts are chosen for an engine before layers are measured",
                          next="leave out --for, list candidates that the engine loads (docs/budget.md), and "
                               f"quantkit export OUT --to pack-quantized --for {recipe.engine} OUT2")
    if recipe.calibration is not None and recipe.calibration.importance != "gradient":
        raise RecipeError(f"recipe {recipe.name!r} says importance: equal",
                          why="the cost of a layer's error is measured by gradients",
                          next="calibration: {importance: gradient}")
    if changed := [transform.name for transform in recipe.transforms
                   if registry("transforms").get(transform.name).layer]:
        raise RecipeError(f"recipe {recipe.name!r} has candidates and the transform {changed[0]}",
                          why="it changes layers once their inputs are measured, and what a layer's error "
                              "costs is measured before",
                          next="leave it out; a transform that changes the whole model beforehand can stay")
    packed = [candidate for candidate in recipe.candidates if candidate.spec is not None]
    for candidate in packed:
        assert candidate.spec is not None
        named = f"candidate {candidate.label()} of recipe {recipe.name!r}"
        if candidate.spec.activations:
            raise RecipeError(f"{named} rounds activations too",
                              why="only the cost of rounding weights is measured", next="leave it out")
        alone = getattr(registry("formats").get(str(candidate.format_name)), "alone", False)
        if alone and any((o.format_name, o.spec) != (candidate.format_name, candidate.spec) for o in packed):
            raise RecipeError(f"{named} can't be mixed with others",
                              why=f"format {candidate.format_name} has place for one spec",
                              next="leave out 'format': pack-quantized can say a mix of integers")


def _check_fixed(recipe: Recipe, fixed: Sequence[PlanRow]) -> None:
    """RecipeError for a candidate whose format has no place for what rules make of other layers."""
    for candidate in recipe.candidates:
        if candidate.spec is None or not getattr(registry("formats").get(str(candidate.format_name)), "alone",
                                                 False):
            continue
        for row in fixed:
            if row.spec and (row.format, row.spec.label()) != (candidate.format_name, candidate.spec.label()):
                named = f"candidate {candidate.label()} of recipe {recipe.name!r}"
                raise RecipeError(f"{named} can't be mixed with what its rules make of {row.name}",
                                  why=f"that is {row.spec.label()} by "
                                  f"{row.format}, and format {candidate.format_name} has place for one spec",
                                  next="leave out 'format': pack-quantized can say a mix of integers")


def _groups(rows: Iterable[PlanRow]) -> list[list[str]]:
    """Names of the layers that get the same, in the model's order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        head, expert, _ = row.name.partition(EXPERT)
        groups[head + expert if expert else row.shares].append(row.name)
    return list(groups.values())


def _common(names: Sequence[str], rows: Rows, recipe: Recipe) -> list[int]:
    """Numbers of the candidates that fit all of these layers."""
    common = [index for index in rows[names[0]] if all(index in rows[name] for name in names)]
    if not common:
        raise RecipeError(f"recipe {recipe.name!r}: no candidate fits all of {', '.join(names)}",
                          why="they get the same, so that engines can fuse them",
                          next="add a candidate {method: null}, which keeps them")
    return common


def _check_range(budget: Budget, limit: int, linears: Sequence[PlanRow], other: int, fixed: int, least: int,
                 largest: int) -> None:
    weights = _weights(linears)
    rounding = 1000 if budget.bits is None else weights // 800 + 1  # of what is named below
    nothing = fixed + largest == sum(row.bytes_before for row in linears)  # is quantized, if all that fits
    if least <= limit and (limit < largest if nothing else limit <= largest + rounding):
        return

    def told(size: int) -> tuple[str, str]:
        """Rounded up: what is named can be had."""
        bits, total = math.ceil(800 * size / weights) / 100, other + size
        return f"{bits:g}bpw", f"{math.ceil(total / 1e3) / 1e3:.3f}MB"

    low, high = told(fixed + least), told(fixed + largest)
    kind = 0 if budget.bits is not None else 1
    small = limit < least
    raise UsageError(f"--budget {budget.text} is {'less' if small else 'more'} than any choice takes",
                     why=f"the candidates take from {low[0]} ({low[1]} with all other tensors) to {high[0]} "
                         f"({high[1]})",
                     next=f"the same command with --budget {low[kind]}" if small
                     else "give less, or leave the model as it is")


def _uniform(recipe: Recipe, linears: Sequence[PlanRow], other: int, rows: Rows,
             costs: Mapping[str, Mapping[int, float]], fixed: int) -> tuple[UniformCandidate, ...]:
    uniforms, labels = [], labels_of(recipe.candidates)
    for index, candidate in enumerate(recipe.candidates):
        if candidate.method is None or any(index not in choices for choices in rows.values()):
            continue
        size = fixed + sum(choices[index].bytes_after for choices in rows.values())
        uniforms.append(UniformCandidate(labels[index], _bits(linears, size), other + size,
                                         math.fsum(costs_of_layer[index]
                                                   for costs_of_layer in costs.values())))
    return tuple(sorted(uniforms, key=lambda uniform: uniform.disk_bytes))


def _weights(rows: Sequence[PlanRow]) -> int:
    return sum(row.shape[0] * row.shape[1] for row in rows)


def _bits(rows: Sequence[PlanRow], size: int) -> float:
    return 8 * size / _weights(rows)


COST, SIZE = 1e4, 1e3
"""What the greatest differences of costs and sizes are scaled to: the solver's tolerances are absolute."""
GAP = 1e-5
"""At which the solver stops: of the least cost, relatively."""


def allocate(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]],
             limit: int) -> list[int] | None:
    """Solve the multiple-choice knapsack: one option for each group, the least cost that fits.

    HiGHS (https://highs.dev) in scipy solves it as an integer program, and proves what it finds the best but
    for :data:`GAP`.

    Args:
        costs: the costs of each group's options, finite.
        sizes: the sizes of the same, whole numbers.
        limit: the size that all chosen options together may have.

    Returns:
        The option of each group; ``None`` if even the smallest don't fit.
    """
    if sum(map(min, sizes)) > limit:
        return None
    beyond = [size - min(options) for options in sizes for size in options]
    unit = math.gcd(*beyond) or 1
    scale = SIZE / (max(beyond) // unit or 1)
    flat = scale * np.array([size // unit for size in beyond], dtype=float)
    cost = np.concatenate([np.asarray(options, dtype=float) - min(options) for options in costs])
    cost *= COST / (cost.max() or 1.0)
    count = len(cost)
    owner = np.repeat(np.arange(len(sizes)), [len(options) for options in sizes])
    one_choice = csr_array((np.ones(count), (owner, np.arange(count))), shape=(len(sizes), count))
    cuts = np.cumsum([len(options) for options in sizes])[:-1]
    room = (limit - sum(map(min, sizes))) // unit
    while True:
        with _silent():
            solution = milp(cost, integrality=np.ones(count), bounds=Bounds(0, 1), constraints=[
                LinearConstraint(one_choice, 1, 1), LinearConstraint(flat[None], -np.inf, scale * room)],
                options={"mip_rel_gap": GAP})
        if solution.x is None:  # the smallest options fit: it isn't the problem's fault
            raise RuntimeError(f"HiGHS: {solution.message}")
        chosen = [int(part.argmax()) for part in np.split(solution.x, cuts)]
        taken = sum(options[index] for options, index in zip(sizes, chosen))
        if taken <= limit:
            return chosen
        room -= 1  # within the solver's tolerance, but not within the limit


@contextmanager
def _silent() -> Iterator[None]:
    """Where undoing its presolve costs precision, HiGHS writes a line to stdout, where it has no business."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        (ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


LONGEST = 400
"""Characters of a pattern, about; a rule takes 512."""
_LAYER = re.compile(r"(.*?\.)(\d+)\.(.+)")


def part_of(name: str) -> str:
    """What a layer is called without its number: ``self_attn.q_proj``; of all experts,
    ``mlp.experts.*.up_proj``."""
    match = _LAYER.fullmatch(name)
    return re.sub(re.escape(EXPERT) + r"\d+\.", f"{EXPERT}*.", match[3] if match else name)


def rules_of(chosen: Mapping[str, int], candidates: Sequence[Candidate]) -> tuple[Rule, ...]:
    """Rules that give each layer its candidate and match no others: exceptions first, then what most
    layers of each part get.

    Args:
        chosen: full name → number of its candidate; experts of one layer have the same.
        candidates: the candidates by number.
    """
    last: list[tuple[int, str]] = []
    layers: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for name, index in chosen.items():
        if (match := _LAYER.fullmatch(name)) is None:
            last.append((index, name))
        else:
            layers[match[1], part_of(name)][int(match[2])] = index
    # parts that have the same candidate in the same layers share a pattern
    parts: dict[tuple[int, str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (prefix, part), choices in layers.items():
        commonest = Counter(choices.values()).most_common(1)[0][0]
        last.append((commonest, f"{prefix}*.{part}"))
        for index in sorted(set(choices.values()) - {commonest}):
            numbers = sorted(number for number, choice in choices.items() if choice == index)
            parts[index, prefix, tuple(numbers)].append(part)
    first = [(index, pattern) for (index, prefix, numbers), tails in parts.items()
             for pattern in _patterns(prefix, numbers, tails)]
    return tuple(Rule(match=match, **dict(candidates[index])) for index, match in (*first, *last))


def _patterns(prefix: str, numbers: Iterable[int], parts: Iterable[str]) -> list[str]:
    r"""``re:model\.layers\.(0|3)\.(self_attn\.q_proj|…)``, in pieces if it is too long."""
    tails = [re.escape(part).replace(r"\.\*\.", r"\.\d+\.") for part in parts]
    tail = tails[0] if len(tails) == 1 else f"({'|'.join(tails)})"
    start, pieces = f"re:{re.escape(prefix)}", [""]
    for number in map(str, numbers):
        longer = f"{pieces[-1]}|{number}" if pieces[-1] else number
        if len(start) + len(tail) + len(longer) + 4 > LONGEST and pieces[-1]:
            pieces.append(number)
        else:
            pieces[-1] = longer
    return [f"{start}({piece})\\.{tail}" if "|" in piece else f"{start}{piece}\\.{tail}" for piece in pieces]
