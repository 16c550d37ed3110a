"""Says before a comparison begins what it consists of, what is there already, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.sweep.models import ModelFacts, facts_of
from quantkit.evaluation.sweep.plan import make_plan, measurable, planned_texts
from quantkit.evaluation.sweep.run import store_of, with_seconds
from quantkit.quantization.planning.duration import expected_seconds, operations
from quantkit.quantization.planning.plan import make_plan as plan_layers
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.transforms.base import with_own_head
from quantkit.sources.open import open_source


@dataclass(frozen=True)
class Outlook:
    """What lies ahead.

    Attributes:
        models, settings, texts: the number of each.
        measurements, kept: the number of measurements, and of those that are there.
        missing: recipes whose checkpoints are to be made.
        seconds: the time that all this may take.
    """

    models: int
    settings: int
    texts: int
    measurements: int
    kept: int
    missing: tuple[str, ...]
    seconds: float

    def sentence(self) -> str:
        """For people, without the time."""
        variants = self.models * self.settings
        parts = [f"{self.models} model{'s' * (self.models > 1)}"]
        parts += [f"{self.settings} KV settings"] if self.settings > 1 else []
        parts += [f"{self.texts} texts"] if self.texts > 1 else []
        text = (f"{variants} variant{'s' * (variants > 1)} ({' × '.join(parts)}), "
                f"{self.measurements} measurements")
        if self.kept:
            text += f", {self.kept} of them there already"
        if self.missing:
            text += f"; to quantize: {', '.join(self.missing)}"
        return text


def look_ahead(uris: Sequence[str], settings: EvalSettings, recipes: Mapping[str, Path]) -> Outlook:
    """Look at what a comparison would do. Checkpoints that aren't there count as models like the first.

    Args:
        uris: models that are there, the reference first.
        settings: the settings of the comparison.
        recipes: recipe → the folder of its checkpoint, which may be missing.

    Raises:
        QuantkitError: a model or a text isn't there, or they can't be compared.
    """
    models = [facts_of(uri, settings.revision_of(number), settings.dtype, hashed=settings.keep)
              for number, uri in enumerate(uris)]
    absent = tuple(recipe for recipe, folder in recipes.items() if not folder.exists())
    for recipe, folder in recipes.items():
        models.append(replace(models[0], uri=str(folder), revision=None, identity=f"not made yet: {recipe}",
                              recipe=folder.name) if recipe in absent
                      else facts_of(str(folder), dtype=settings.dtype, recipe=folder.name,
                                    hashed=settings.keep))
    settings = measurable(models, settings)
    plan = make_plan(models, settings, planned_texts(settings))
    store = store_of(settings.keep and not settings.fresh)
    missing = [measurement for measurement in plan.measurements if not store.has(measurement.key)]
    seconds = sum(measurement.seconds for measurement in with_seconds(missing, models[0]))
    seconds += _quantize_seconds(models[0], absent)
    return Outlook(len(models), len(plan.kv), len(plan.texts), len(plan.measurements),
                   len(plan.measurements) - len(missing), absent, seconds)


def _quantize_seconds(model: ModelFacts, recipes: Sequence[str]) -> float:
    """What quantizing a model by these recipes may take, as far as that is known."""
    seconds = 0.0
    if recipes:
        rate = operations()
        with closing(open_source(model.uri, model.revision)) as source:
            for recipe in map(load_recipe, recipes):
                if not recipe.candidates:
                    layers = plan_layers(recipe, with_own_head(recipe, source))
                    seconds += sum(expected_seconds(layers, rate) or ()) / 2
    return seconds
