"""What four bits cost in each Linear, for the map of where a model is sensitive."""

from __future__ import annotations

from contextlib import closing

from quantkit.budget.sensitivity import sensitivities
from quantkit.planning.plan import candidate_rows, make_plan
from quantkit.progress import Listener, silent
from quantkit.recipe import Candidate, Recipe, Rule
from quantkit.sources.open import open_source
from quantkit.spec import CalibrationSpec, Granularity, QuantSpec

GROUP = 64


def sensitivity_map(uri: str, revision: str | None, progress: Listener = silent) -> list[tuple[str, float]]:
    """The divergence that rounding one Linear to 4 bits in groups of 64 would cause, nats a token, by the
    measure of :mod:`quantkit.budget.sensitivity`.

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
