"""Lists a model's weights and KV settings, counts what each pair takes, and sorts pairs by expected loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.capacity_search.losses import losses
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.models.architecture import parse_config
from quantkit.models.loadable import dtype_of
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import list_recipes, load_recipe
from quantkit.quantization.transforms.base import transformed, with_own_head
from quantkit.runtime.cpu.model import reason_against
from quantkit.runtime.memory.kv import Footprint
from quantkit.runtime.memory.scratch import scratch_bytes
from quantkit.runtime.memory.serving import ModelMemory, Requirements, kv_footprint
from quantkit.runtime.memory.weights import (
    UNQUANTIZED,
    ModelWeights,
    model_weights,
    of_checkpoint,
    unquantized,
)
from quantkit.sources.base import ModelSource
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from.

    Attributes:
        pairs: weights and a KV setting.
        left_out: recipes and settings that don't fit this model, and why.
    """

    pairs: tuple[tuple[ModelWeights, KVSpec], ...]
    left_out: dict[str, str] = field(default_factory=dict)


def candidates(uri: str, revision: str | None = None, recipes: Sequence[str] = (),
               settings: Sequence[KVSpec] = (), progress: Listener = silent) -> Candidates:
    """Everything that can be named and was measured, or what is given.

    Args:
        uri: a checkpoint, whose weights are what they are, or anything that a source takes.
        revision: the revision of a model on the hub.
        recipes: names or files; ``none`` leaves the weights as they are. Without any: all that can be named.
        settings: KV settings. Without any: those whose loss was measured, none of which drops anything;
            for a recipe that has a setting of its own, that one.
        progress: told of each recipe before it is counted.

    Raises:
        UsageError: recipes for a checkpoint, or one that leaves a choice to a budget.
        QuantkitError: the model isn't there or isn't known; what is given doesn't exist or doesn't fit.
    """
    for name in recipes:  # before a model is opened
        if name != UNQUANTIZED:
            load_recipe(name)
    specs = list(settings)
    source = open_model(uri, revision)
    left_out = dict[str, str]()
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            if recipes:
                raise UsageError(f"{uri} is quantized already", why="a recipe is for weights as they were",
                                 next="leave out --recipe, or name the original")
            weights = [of_checkpoint(source, reason_against)]
        elif recipes:
            weights = [_named(name, source, uri) for name in dict.fromkeys(recipes)]
        else:
            weights = _all(source, left_out, progress)
    finally:
        source.close()
    if not specs:
        for text in losses().kv:
            spec = parse_kv(text)
            try:
                KVCache(weights[0].config, spec, weights[0].dtype, "meta")
                specs.append(spec)
            except UsageError as error:
                left_out[text] = error.why or error.what
    pairs = [(option, kv) for option in weights
             for kv in (specs if settings or option.kv is None else [parse_kv(option.kv)])]
    return Candidates(tuple(pairs), left_out)


def _named(name: str, source: ModelSource, uri: str) -> ModelWeights:
    if name == UNQUANTIZED:
        return unquantized(source, reason_against)
    if load_recipe(name).candidates:
        raise UsageError(f"recipe {name!r} leaves a choice", why="its widths follow from a budget",
                         next=f"quantkit quantize {uri} --recipe {name} --budget 4.25bpw --dry-run")
    return by_recipe(name, source)


def _all(source: ModelSource, left_out: dict[str, str], progress: Listener) -> list[ModelWeights]:
    options = [unquantized(source, reason_against)]
    recipes = list_recipes()
    for number, info in enumerate(recipes):
        progress(ProgressEvent(number, len(recipes), info.name, unit="recipes"))
        try:
            if not load_recipe(info.name).candidates:
                options.append(by_recipe(info.name, source))
        except QuantkitError as error:
            left_out[info.name] = error.what
    progress(ProgressEvent(len(recipes), len(recipes), "counted", unit="recipes"))
    return options


def by_recipe(name: str, source: ModelSource) -> ModelWeights:
    """What a recipe, named or a file, would make.

    Raises:
        QuantkitError: there is none, it doesn't fit the model, or it leaves a choice to a budget.
    """
    recipe = load_recipe(name)
    seen = with_own_head(recipe, transformed(recipe.transforms, source))
    plan = make_plan(recipe, seen)
    rows = [row.recorded() for row in plan.rows]
    weights = model_weights(recipe.name, recipe.description, parse_config(seen.config()),
                            dtype_of(seen.config(), "auto"), rows, plan.other_bytes, plan.disk_bytes,
                            reason_against)
    return dataclasses.replace(weights, recipe=name, kv=recipe.kv)


@dataclass(frozen=True)
class Combination(ModelMemory):
    """Weights and a KV setting, and what both cost.

    Attributes:
        weights_kl, kv_kl: measured on another model, nats a token; ``None``: never measured.
    """

    weights_kl: float | None
    kv_kl: float | None

    @property
    def kl(self) -> float | None:
        """Both together: what was measured of both at once is their sum, near enough (docs/plan.md)."""
        if self.weights_kl is None or self.kv_kl is None:
            return None
        return round(self.weights_kl + self.kv_kl, 8)

    @property
    def rank(self) -> tuple[Any, ...]:
        """The less, the better: measured before never measured, expected loss, bytes, names."""
        return (self.weights_kl is None, self.kv_kl is None, (self.weights_kl or 0.0) + (self.kv_kl or 0.0),
                self.total, self.weights.name, str(self.kv))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``: bytes, and what was measured."""
        return {"weights": self.weights.name, "kv": str(self.kv), "expected_kl": self.kl,
                "weights_kl": self.weights_kl, "kv_kl": self.kv_kl, "weight_bytes": self.weights.bytes,
                "weight_file_bytes": self.weights.file_bytes, "kv_bytes": self.kv_bytes,
                "kv_spare_bytes": self.spare_bytes, "other_bytes": self.scratch, "total_bytes": self.total,
                "left_bytes": self.left, "fits": self.left >= 0}


def combine(pairs: Sequence[tuple[ModelWeights, KVSpec]], requirements: Requirements) -> list[Combination]:
    """Every combination counted, the best first, fitting or not.

    Raises:
        UsageError: the context is longer than the model's, or a KV setting doesn't fit the model.
    """
    limit = pairs[0][0].config.max_position_embeddings
    if requirements.context > limit:
        raise UsageError(f"a context of {requirements.context:,} tokens is asked for",
                         why=f"the model was made for {limit:,}", next=f"--context {limit}")
    figures = losses()
    footprints = dict[str, Footprint]()
    combinations = []
    for weights, kv in pairs:
        if (name := str(kv)) not in footprints:
            footprints[name] = kv_footprint(weights, kv, requirements)
        combinations.append(Combination(
            weights, kv, footprints[name], requirements,
            scratch_bytes(weights, footprints[name], requirements.context, requirements.concurrency),
            figures.of_weights(weights.name), figures.of_kv(name)))
    return sorted(combinations, key=lambda combination: combination.rank)


def pareto_front(combinations: Sequence[Combination]) -> list[Combination]:
    """The combinations, in order of :attr:`Combination.rank`, that need less than every better one."""
    front: list[Combination] = []
    for combination in combinations:
        if not front or combination.total < front[-1].total:
            front.append(combination)
    return front
