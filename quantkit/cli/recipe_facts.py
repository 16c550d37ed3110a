"""What a recipe comes to on a usual model, so that one can be chosen from a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.support.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.quantization.recipe import Recipe
    from quantkit.sources.base import ModelSource

USUAL = "synthetic:llama-1b?layers=1"
"""The model whose shapes are planned for: Llama's, with its head tied to the embedding."""
START = {
    "int4-asym": "most uses: 4 bits, closest to the original",
    "int5-asym": "answers that hardly change",
    "int8-gptq": "the same answers as the original's",
    "int8": "needs no text and only seconds",
    "int4": "4 bits that transformers loads too",
    "gguf-q4_k_m": "for llama.cpp, Ollama and LM Studio",
}
"""Where to start → for what; docs/recipes.md has the measurements."""


@dataclass(frozen=True)
class RecipeFacts:
    """What is said of a recipe.

    Attributes:
        bits: stored bits a weight of the decoder's Linears; ``None`` where a budget decides.
        kl: nats a token that it cost the model of :mod:`quantkit.capacity_search.losses`, if it was measured.
        calibration: ``text``, ``random`` (tokens), or ``none``.
        engines: the engines that load such a checkpoint beside quantkit, on a GPU.
    """

    bits: float | None
    kl: float | None
    calibration: str
    engines: tuple[str, ...]


def recipe_facts(recipe: Recipe, source: ModelSource) -> RecipeFacts:
    """Plan the recipe for ``source``, which is :data:`USUAL`; nothing is read or computed."""
    from quantkit.capacity_search.losses import losses
    from quantkit.checkpoint.engines import check_layers, sort_engines
    from quantkit.checkpoint.quantization_config import config_words
    from quantkit.quantization.planning.plan import make_plan, with_own_head

    kl = losses().of_weights(recipe.name)
    if recipe.candidates:
        return RecipeFacts(None, kl, "text", ())
    source = with_own_head(recipe, source)
    plan = make_plan(recipe, source)
    rows = [row for row in plan.rows if row.layer is not None]
    bits = 8 * sum(row.bytes_after for row in rows) / sum(row.shape[0] * row.shape[1] for row in rows)
    spec = plan.calibration
    calibration = "none" if spec is None else "random" if spec.text == "random" else "text"
    if any((row.format or "").startswith("gguf-") for row in rows):
        return RecipeFacts(bits, kl, calibration, ("llama.cpp",))
    layers = [row.recorded() for row in plan.rows]
    config = {**source.config(), **config_words(layers)}
    loads, _ = sort_engines(lambda engine: check_layers(engine, config, layers))
    return RecipeFacts(bits, kl, calibration, tuple(loads))


def facts_of_all(names: list[str]) -> dict[str, RecipeFacts]:
    """By name, of all recipes that fit the usual model."""
    from quantkit.quantization.recipe import load_recipe
    from quantkit.sources.open import open_source

    facts: dict[str, RecipeFacts] = {}
    source = open_source(USUAL)
    try:
        for name in names:
            try:
                facts[name] = recipe_facts(load_recipe(name), source)
            except QuantkitError:  # it is made for other models, or a file is broken
                continue
    finally:
        source.close()
    return facts
