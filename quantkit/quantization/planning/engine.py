"""Makes of a recipe what a given engine loads: its layouts, and 16 bits where it expects a plain weight.

quantkit runs every mix of formats, so by default a recipe quantizes the embedding and the head too. Other
engines load less: transformers no quantized embedding and no zero points, vLLM no 6 bits, bitsandbytes one
format for all layers. A rule that names no format gets the layout of an engine that has its own, integers
with zero points become symmetric for one that has none of these, and one that has 4 and 8 bits alone gets the
nearest of them. A recipe with ``for: ENGINE`` is then planned in up to
three variants, and the first that the engine loads is taken: as it is, with a plain embedding, and with a
plain embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quantkit.checkpoint.engines import reason_against, reason_against_experts
from quantkit.checkpoint.quantization_config import COMPRESSED, NF4
from quantkit.formats.mlx import BITS, GROUPS
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.modules import renamed
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.recipe import Candidate, Recipe, Rule, spec_of
from quantkit.sources.split_experts import read_together
from quantkit.support.errors import RecipeError

LLAMA_CPP = {8: ("gguf-q8_0", None), 6: ("gguf-q6_k", "gguf-q8_0"), 5: ("gguf-q5_k", "gguf-q5_1"),
             4: ("gguf-q4_k", "gguf-q5_0")}
"""llama.cpp's type of integers by their bits, and the one for rows that aren't whole superblocks."""
TOGETHER = "transformers reads this family's experts only together, unquantized"
FOUR_OR_EIGHT_BITS = ("vllm", "sglang")
"""Engines whose kernels have no integers between."""
RUN_ELSEWHERE = ("vllm", "sglang", "transformers")
"""Engines for which a model is quantized that quantkit doesn't run: the first, if none is asked for."""
PLAIN: tuple[tuple[str, ...], ...] = ((), (EMBEDDING,), (EMBEDDING, HEAD))
"""What is kept in 16 bits, from the smallest checkpoint to the largest."""


def variants(recipe: Recipe) -> list[Recipe]:
    """The recipes to try for ``recipe.engine``, the smallest checkpoint first. They leave the engine open."""
    rules = tuple(rule.model_copy(update=_layout(rule, recipe.engine)) for rule in recipe.rules)
    changed = recipe.model_copy(update={"engine": "quantkit"})
    # a rule whose only layer is kept by one before it isn't an error here
    return [changed.model_copy(update={"rules": rules if not names else (
        *(Rule(match=name, optional=True) for name in names),
        *(rule.model_copy(update={"optional": True}) for rule in rules))}) for names in PLAIN]


def candidates_for(recipe: Recipe, engine: str) -> tuple[Candidate, ...]:
    """The candidates that an engine of :data:`FOUR_OR_EIGHT_BITS` reads, each once."""
    changed = [candidate.model_copy(update=_layout(candidate, engine)) for candidate in recipe.candidates]
    return tuple({(candidate.method, candidate.spec, candidate.format): candidate for candidate in changed
                  if candidate.spec is None or (candidate.format_name in COMPRESSED and (
                      candidate.spec.kind != "int" or candidate.spec.bits in (4, 8)))}.values())


def reason_against_rows(engine: str, rows: Sequence[PlanRow], config: Mapping[str, Any]) -> str | None:
    """Why an engine doesn't load such layers on a GPU; ``None`` if it does."""
    if engine != "llama.cpp":
        return reason_against(engine, config, [row.recorded() for row in rows])
    row = next((row for row in rows if row.spec and not str(row.format).startswith("gguf-")), None)
    return f"{row.name}: llama.cpp has no type for {row.spec.label()}" if row and row.spec else None


def reason_against_tower(engine: str, rows: Sequence[PlanRow], model_type: str) -> str | None:
    """Why another engine wouldn't see which modules of a model of images and text are quantized."""
    if engine == "transformers" and read_together(model_type, (row.name for row in rows)):
        return TOGETHER
    outside = next((row for row in rows if row.spec is not None and row.layer is None), None)
    if outside is not None:
        return f"{outside.name} is quantized, and only layers are named by patterns that mean no tower"
    other = next((row for row in rows if row.spec is not None and row.format not in COMPRESSED), None)
    return None if other is None else (
        f"format {other.format} is read for all Linears of a model or for none, and the tower for images has "
        "some")


def reason_against_transformers(rows: Sequence[PlanRow], model_type: str) -> str | None:
    """Why transformers doesn't read a model of an unknown family as it shall be quantized."""
    if any(row.format == NF4 and ".experts." in row.name for row in rows):
        return "transformers keeps the experts of a layer in one tensor, which bitsandbytes doesn't quantize"
    if read_together(model_type, (row.name for row in rows)):
        return TOGETHER
    if any(row.spec is not None and not row.spec.symmetric for row in rows):
        return "transformers reads no packed zero points"
    if (other := renamed(model_type, (row.name for row in rows if row.spec is not None))) is not None:
        return f"{other[0]} is {other[1]} in transformers, where its quantized parts aren't found"
    return reason_against_experts(rows)


def reason_against_family(engine: str, rows: Sequence[PlanRow], model_type: str) -> str | None:
    """Why an engine of :data:`RUN_ELSEWHERE` doesn't read a model of an unknown family as it shall be
    quantized."""
    packed = [row for row in rows if row.spec is not None]
    for row in packed:
        if row.format not in COMPRESSED and (engine, row.format) != ("transformers", NF4):
            return (f"format {row.format} is read for all Linears of a model or for none, and it may have "
                    "others" if row.format != NF4 else f"{engine} reads no {NF4}")
        assert row.spec is not None
        if engine in FOUR_OR_EIGHT_BITS and row.spec.kind == "int" and row.spec.bits not in (4, 8):
            return f"{row.name} is {row.spec.label()}, and {engine} has kernels for integers of 4 and 8 bits"
    return reason_against_transformers(rows, model_type) if engine == "transformers" else None


def unknown_family(recipe: Recipe, model_type: str, why: str) -> RecipeError:
    """That a recipe can't be used on a model whose mathematics isn't known here."""
    return RecipeError(f"recipe {recipe.name!r} can't be used on a model of type {model_type!r}",
                       why=why, next="use int4, nvfp4 or mxfp4, which are calibrated through transformers, "
                                     "or int8, int4-rtn, fp8, fp8-block, which aren't calibrated")


def refuse(recipe: Recipe, reason: str) -> NoReturn:
    """Raise RecipeError: no variant is loaded by the engine."""
    raise RecipeError(f"{recipe.engine} loads no checkpoint of recipe {recipe.name!r}", why=reason,
                      next="quantkit recipes list")


def _layout(rule: Candidate, engine: str) -> dict[str, Any]:
    """What becomes of a rule that names no layout, for an engine that has its own, or fewer kinds."""
    spec = rule.spec
    if spec is None or rule.format is not None or spec.kind != "int" or spec.activations:
        return {}
    if engine == "llama.cpp" and spec.bits in LLAMA_CPP:
        form, fallback = LLAMA_CPP[spec.bits]
        return {"format": form, "spec": spec_of(form), "fallback": fallback}
    if engine == "mlx" and spec.bits in BITS:
        size = spec.granularity.size if spec.granularity.size in GROUPS else 64
        group = Granularity(strategy="group", size=size)
        return {"format": "mlx", "spec": QuantSpec(bits=spec.bits, symmetric=False, minimum=True,
                                                   granularity=group)}
    if engine == "transformers" and not spec.symmetric:
        return {"spec": spec.model_copy(update={"symmetric": True})}
    if engine in FOUR_OR_EIGHT_BITS:
        return {"spec": spec.model_copy(update={"bits": 4}) if spec.bits == 5 else spec.in_bytes}
    return {}
