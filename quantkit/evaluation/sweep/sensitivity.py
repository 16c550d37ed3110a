"""What four bits cost in each Linear, for the map of where a model is sensitive."""

from __future__ import annotations

from contextlib import closing

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.budget.sensitivity import sensitivities
from quantkit.quantization.planning.plan import candidate_rows, make_plan
from quantkit.quantization.recipe import Candidate, Recipe, Rule
from quantkit.quantization.specs import CalibrationSpec
from quantkit.sources.open import open_source
from quantkit.support.progress import Listener, silent

GROUP = 64


def sensitivity_map(uri: str, revision: str | None, progress: Listener = silent) -> list[tuple[str, float]]:
    """The divergence that rounding one Linear to 4 bits in groups of 64 would cause, nats a token, by the
    measure of :mod:`quantkit.quantization.budget.sensitivity`.

    Raises:
        QuantkitError: the model can't be read, or a value isn't finite.
        Stopped: interrupted; what was measured is kept.
    """
    spec = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=GROUP))
    recipe = Recipe(name="sensitivity", description="What four bits cost in each layer.",
                    rules=(Rule(match="lm_head", optional=True),),
                    candidates=(Candidate(method="rtn", spec=spec), Candidate(method=None)),
                    calibration=CalibrationSpec(windows=8, window=512))
    with closing(open_source(uri, revision)) as source:
        plan = make_plan(recipe.model_copy(update={"candidates": ()}), source)
        rows = candidate_rows(recipe, source)
        costs = sensitivities(source, plan, recipe.candidates, rows, progress)
    return [(name, choices[0]) for name, choices in costs.items() if 0 in choices]
