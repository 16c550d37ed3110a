"""Lists the weights and KV settings that a plan for a model can choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.capacity.losses import losses
from quantkit.capacity.weights import KEPT, WeightOption, by_recipe, kept, of_checkpoint
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.quantization.recipe import list_recipes, load_recipe
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

    pairs: tuple[tuple[WeightOption, KVSpec], ...]
    left_out: dict[str, str] = field(default_factory=dict)


def candidates(uri: str, revision: str | None = None, recipes: Sequence[str] = (),
               settings: Sequence[KVSpec] = (), progress: Listener = silent) -> Candidates:
    """Everything that can be named and was measured, or what is given.

    Args:
        uri: a checkpoint, whose weights are what they are, or anything that a source takes.
        revision: of a model on the hub.
        recipes: names or files; ``none`` leaves the weights as they are. Without any: all that can be named.
        settings: of the KV cache. Without any: those whose loss was measured, none of which drops anything;
            for a recipe that has a setting of its own, that one.
        progress: told of each recipe before it is counted.

    Raises:
        UsageError: recipes for a checkpoint, or one that leaves a choice to a budget.
        QuantkitError: the model isn't there or isn't known; what is given doesn't exist or doesn't fit.
    """
    for name in recipes:  # before a model is opened
        if name != KEPT:
            load_recipe(name)
    specs = list(settings)
    source, left_out = open_model(uri, revision), dict[str, str]()
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            if recipes:
                raise UsageError(f"{uri} is quantized already", why="a recipe is for weights as they were",
                                 next="leave out --recipe, or name the original")
            weights = [of_checkpoint(source)]
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


def _named(name: str, source: ModelSource, uri: str) -> WeightOption:
    if name == KEPT:
        return kept(source)
    if load_recipe(name).candidates:
        raise UsageError(f"recipe {name!r} leaves a choice", why="its widths follow from a budget",
                         next=f"quantkit quantize {uri} --recipe {name} --budget 4.25bpw --dry-run")
    return by_recipe(name, source)


def _all(source: ModelSource, left_out: dict[str, str], progress: Listener) -> list[WeightOption]:
    options, recipes = [kept(source)], list_recipes()
    for number, info in enumerate(recipes):
        progress(ProgressEvent(number, len(recipes), info.name, unit="recipes"))
        try:
            if not load_recipe(info.name).candidates:
                options.append(by_recipe(info.name, source))
        except QuantkitError as error:
            left_out[info.name] = error.what
    progress(ProgressEvent(len(recipes), len(recipes), "counted", unit="recipes"))
    return options
