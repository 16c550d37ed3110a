"""Recipes: which method, spec and format each layer gets. A YAML file, read as data and never as code."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quantkit.formats.spec import QuantSpec
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import EMBEDDING
from quantkit.plugins.manager import current, registry
from quantkit.plugins.registry import described, explain_absent
from quantkit.quantization.effort import Effort, with_effort
from quantkit.support.errors import QuantkitError, RecipeError, UsageError, did_you_mean
from quantkit.support.frozen import Frozen
from quantkit.support.paths import local_path
from quantkit.support.patterns import compiled
from quantkit.support.safe_yaml import YamlDocument, read_yaml


class TransformSpec(Frozen):
    """A change to the model that keeps its function, made before weights are quantized.

    Attributes:
        name: a registered transform.
        options: its own, checked when a plan is made.
    """

    name: str = Field(min_length=1, max_length=64)
    options: dict[str, Any] = Field(default_factory=dict)


class RecoverySpec(Frozen):
    """Training of scales and norms after all layers are quantized.

    Attributes:
        name: a registered recovery.
        windows: the number of windows of the calibration's text, beyond those that layers are calibrated on;
            some of them aren't trained on and decide whether the result is kept.
        options: its own, checked when a plan is made.
    """

    name: str = Field(min_length=1, max_length=64)
    windows: int = Field(default=40, ge=2)
    options: dict[str, Any] = Field(default_factory=dict)


class CalibrationSpec(Frozen):
    """Which text a calibrated method sees.

    Attributes:
        text: ``builtin`` (passages of many kinds that ship with quantkit, then docstrings of Python's
            standard library: offline, and apart from the default evaluation text), a text file, a
            folder of them, a ``.jsonl`` or ``.parquet`` file of texts or conversations,
            ``hub:OWNER/NAME[:SPLIT][:FILE]``; or several of these. Or ``self``: the model writes it. Or
            ``random``: no text at all, but tokens drawn from the vocabulary.
        windows: the number of windows.
        window: tokens in each.
        seed: chooses the windows.
        importance: says what a token's error counts for in a layer: ``gradient`` (how much the model's
            answer depends on that layer there) or ``equal``.
        importance_windows: windows of which gradients are found, evenly spread; any other token counts for
            what theirs do on average at its place in a window.
        packing: how documents become windows: ``stream`` (one after another, cut anywhere),
            ``documents`` (each window begins where a document does and is filled with the next ones);
            ``auto``: ``documents`` where there are conversations.
        avoid: texts that will be evaluated on: what shares passages with them is left out.
    """

    text: str | Annotated[tuple[str, ...], Field(strict=False)] = "builtin"
    windows: int = Field(default=24, ge=1)
    window: int = Field(default=512, ge=8)
    seed: int = 0
    importance: Literal["gradient", "equal"] = "gradient"
    importance_windows: int = Field(default=4, ge=1)
    packing: Literal["auto", "stream", "documents"] = "auto"
    avoid: tuple[str, ...] = Field(default=(), strict=False)

    @field_validator("text")
    @classmethod
    def _named(cls, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not text or ("" in text and not isinstance(text, str)):
            raise ValueError("no text is named")
        if text != "self" and "self" in text and not isinstance(text, str):
            raise ValueError("text that the model writes itself can't be mixed with other texts")
        if text != "random" and "random" in text and not isinstance(text, str):
            raise ValueError("random tokens can't be mixed with texts")
        return text

    @property
    def self_written(self) -> bool:
        """Whether the model writes the text that it is calibrated on."""
        return self.text == "self"

    @property
    def texts(self) -> tuple[str, ...]:
        """What ``text`` names, one or several."""
        return (self.text,) if isinstance(self.text, str) else self.text

    def without_folders(self) -> CalibrationSpec:
        """The same, with no folder of this machine in it."""
        names = tuple(map(_last_part, self.texts))
        return self.model_copy(update={"text": names[0] if isinstance(self.text, str) else names,
                                       "avoid": tuple(map(_last_part, self.avoid))})


def tokens_of(text: str) -> str:
    """How the tokens of a calibration are called, by :attr:`CalibrationSpec.text`."""
    return "tokens drawn at random" if text == "random" else f"tokens of {text}"


def _last_part(text: str) -> str:
    if text.startswith("hub:"):
        return text
    return (local_path(text) or Path(text)).name or text


MAX_EXTENDS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


_GGUF = {("int", 4, "int"): "q4_0", ("int", 5, "int"): "q5_0", ("int", 4, "int superblocks"): "q4_k",
         ("int", 5, "int superblocks"): "q5_k", ("int", 6, "int superblocks"): "q6_k",
         ("iq", 4, "iq"): "iq4_nl"}
"""llama.cpp's types of weights, by kind, bits and grid."""


def default_format(spec: QuantSpec) -> str:
    """The standard layout of such weights."""
    if spec.kind == "int" and spec.activations:
        return "int-quantized"
    if spec.grid == "fp4":
        return "nvfp4-pack-quantized" if spec.scale_dtype == "e4m3" else "mxfp4-pack-quantized"
    if spec.signed or spec.grid in ("int superblocks", "iq"):
        return f"gguf-{_GGUF.get((spec.kind, spec.bits, spec.grid), 'q8_0')}"
    if spec.minimum:
        return "mlx"
    return {"int": "pack-quantized", "nf": "bnb-nf4", "fp": "float-quantized",
            "trellis": "trellis"}[spec.kind]


def spec_of(form: object) -> QuantSpec | None:
    """The spec of a registered format that can hold no other; ``None`` of any other name."""
    formats = registry("formats")
    if not isinstance(form, str) or form not in formats:
        return None
    only = getattr(formats.get(form), "spec", None)
    return only if isinstance(only, QuantSpec) else None


class Candidate(Frozen):
    """One way to store a layer.

    Attributes:
        method: a registered method; ``null`` keeps the layer as it is.
        spec: how the weight is represented; needed with a method, unless the format can hold one spec only.
            A trellis without a window has that which this machine decodes fastest.
        options: the method's own, checked against its model when a plan is made.
        format: a registered format; by default the standard one of the spec.
        fallback: a registered format that can hold one spec only, for layers whose shape ``format`` refuses.
    """

    method: str | None = None
    spec: QuantSpec | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    format: str | None = None
    fallback: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _spec_of_format(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("method") is None or values.get("spec") is not None:
            return values
        only = spec_of(values.get("format"))
        return values if only is None else {**values, "spec": only.model_dump()}

    @model_validator(mode="before")
    @classmethod
    def _window_of_machine(cls, values: Any) -> Any:
        spec = values.get("spec") if isinstance(values, dict) else None
        if not isinstance(spec, dict) or spec.get("kind") != "trellis" or "window" in spec:
            return values
        from quantkit.ops.cpu_linear import fastest_window

        return {**values, "spec": {**spec, "window": fastest_window()}}

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.method is None and (self.spec or self.options or self.format or self.fallback):
            raise ValueError(f"a {type(self).__name__.lower()} without a method keeps the layer as it is: "
                             "it takes no spec, options or format")
        if self.method is not None and self.spec is None:
            raise ValueError(f"method {self.method!r} needs a spec")
        if self.fallback is not None and spec_of(self.fallback) is None:
            raise ValueError(f"fallback {self.fallback!r} is no format that can hold one spec only, such as "
                             "gguf-q8_0")
        return self

    @property
    def format_name(self) -> str | None:
        """The format, with the spec's default filled in."""
        return self.format or (default_format(self.spec) if self.spec else None)

    def label(self) -> str:
        """``int4 g64 sym``, and the format where it isn't the standard one; ``kept``."""
        if self.spec is None:
            return "kept"
        return " ".join(filter(None, (self.spec.label(), self.format)))


class Rule(Candidate):
    """What happens to the layers whose name matches.

    Attributes:
        match: a glob on the layer's full name (``*.down_proj``), or ``re:`` and a regular
            expression that must match the whole of it.
        optional: a rule that matches no layer is an error unless this is true (``lm_head`` exists
            only in models whose embeddings aren't tied). Without it a rule with ``match: lm_head`` gives a
            tied head a copy of its own.
        tied: the rule is only for models whose embedding is the head too (``true``), or only for others.
        layers: the rule is only for these decoder layers: numbers, of which -1 is the last; or a share, such
            as 0.25 for the first and the last quarter, rounded up.
    """

    match: str = Field(min_length=1, max_length=512)
    optional: bool = False
    tied: bool | None = None
    layers: Annotated[tuple[int, ...], Field(strict=False, min_length=1, max_length=512)] | Annotated[
        float, Field(gt=0, le=0.5)] | None = None

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.match.startswith("re:"):
            try:
                compiled(self.match[3:])
            except ValueError as error:
                raise ValueError(f"match {self.match!r} {error}") from None
        return self

    def matches(self, layer: str, tied: bool = False, count: int = 0) -> bool:
        """Whether this rule speaks of ``layer`` (a full name without ``.weight``) in a model of ``count``
        decoder layers whose embedding is its head too, or isn't. Of the embedding speaks only one that spells
        ``embed_tokens`` out: it is no Linear, and ``*`` doesn't mean it."""
        if self.tied not in (None, tied) or (layer == EMBEDDING and "embed_tokens" not in self.match):
            return False
        if self.layers is not None and not self._is_for(layer, count):
            return False
        if self.match.startswith("re:"):
            return re.fullmatch(self.match[3:], layer) is not None
        return fnmatch.fnmatchcase(layer, self.match)


    def _is_for(self, layer: str, count: int) -> bool:
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", layer)
        if number is None:
            return False
        places = int(number[1]), int(number[1]) - count
        if isinstance(self.layers, float):
            near = math.ceil(self.layers * count)
            return places[0] < near or places[1] >= -near
        return self.layers is not None and any(place in self.layers for place in places)


class Recipe(Frozen):
    """Ordered rules; the first that matches a layer decides. See ``docs/architecture.md``.

    ``kv`` says how keys and values are kept when the checkpoint runs, as ``--kv`` does. ``for`` names the
    engine that must load the checkpoint (:mod:`quantkit.quantization.planning.engine`). ``transforms``
    change the model first, in their order, written as names or as ``{name, options}``. ``candidates`` are
    what a budget chooses from for the layers that no rule takes (:mod:`quantkit.quantization.budget`).
    ``recover`` trains scales and norms at the end, written as a name or as ``{name, windows, options}``.
    ``effort`` says how much time that may take (:mod:`quantkit.quantization.effort`).
    """

    name: str = Field(min_length=1, max_length=64)
    description: str = ""
    calibration: CalibrationSpec | None = None
    rules: tuple[Rule, ...] = Field(default=(), strict=False, max_length=256)
    kv: str | None = Field(default=None, max_length=256)
    engine: Literal["quantkit", "vllm", "sglang", "transformers", "mlx", "llama.cpp"] = Field(
        default="quantkit", alias="for")
    candidates: tuple[Candidate, ...] = Field(default=(), strict=False, max_length=32)
    transforms: tuple[TransformSpec, ...] = Field(default=(), strict=False, max_length=16)
    recover: RecoverySpec | None = None
    effort: Effort = "default"

    @field_validator("transforms", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"name": transform} if isinstance(transform, str) else transform for transform in value]

    @field_validator("recover", mode="before")
    @classmethod
    def _recovery_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def snapshot(self) -> dict[str, Any]:
        """The recipe as plain data for the manifest: ``extends`` resolved, no folder of this machine, no
        key that it doesn't use."""
        data = self.model_dump(mode="json")
        for choice in (*data["rules"], *data["candidates"]):
            for key in ("fallback", "tied", "layers"):
                if choice.get(key) is None:
                    choice.pop(key, None)
        if (engine := data.pop("engine")) != "quantkit":
            data["for"] = engine
        if not self.candidates:
            del data["candidates"]
        if self.calibration is not None:
            data["calibration"] = self.calibration.without_folders().model_dump(mode="json")
        if not self.transforms:
            del data["transforms"]
        if self.recover is None:
            del data["recover"]
        if self.effort == "default":
            del data["effort"]
        return data


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe that can be named. ``error`` says why its file is unusable, if it is."""

    name: str
    description: str
    owner: str
    path: Path
    error: str | None = None


def load_recipe(name_or_path: str, effort: Effort | None = None) -> Recipe:
    """Load a recipe by name, or from a ``.yaml`` file; its effort, or the one that is given, is resolved.

    Raises:
        RecipeError: not found, found twice, malformed (with the line), or its ``extends`` is bad.
    """
    if _is_path(name_or_path):
        recipe = _load(local_path(name_or_path) or Path(name_or_path), ())
    else:
        recipe = _load(_find(name_or_path), (name_or_path,))
    return with_effort(recipe, effort or recipe.effort)


def list_recipes() -> list[RecipeInfo]:
    """Every recipe that can be named, by name. A broken file is listed with its error."""
    recipes = []
    for owner, path in _files():
        try:
            recipe, problem = _load(path, (path.stem,)), None
        except QuantkitError as error:
            recipe, problem = None, str(error)
        except Exception as error:  # of a plugin that the recipe names
            recipe, problem = None, described(error)
        recipes.append(RecipeInfo(path.stem, recipe.description if recipe else "", owner, path, problem))
    return sorted(recipes, key=lambda info: (info.name, info.owner))


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.endswith((".yaml", ".yml"))


def _files() -> list[tuple[str, Path]]:
    return [(info.distribution, path) for info, path in current().files("recipe_dirs")]


def _find(name: str) -> Path:
    files = _files()
    matches = [(owner, path) for owner, path in files if path.stem == name]
    if len(matches) > 1:
        raise RecipeError(f"two recipes are called {name!r}",
                          why=" and ".join(f"{path} (of {owner})" for owner, path in matches),
                          next=f"name the file itself: --recipe {matches[0][1]}")
    if not matches:
        why, then = explain_absent("recipe", name) or (did_you_mean(name, {path.stem for _, path in files}),
                                                       "quantkit recipes list")
        raise RecipeError(f"no recipe is called {name!r}", why=why, next=then)
    return matches[0][1]


def _load(path: Path, chain: tuple[str, ...]) -> Recipe:
    """Load a file; ``chain`` holds the names that extend one another up to here."""
    document = read_yaml(path)
    data = dict(document.data)
    parent = data.pop("extends", None)
    data.setdefault("name", path.stem)
    recipe = document.build(Recipe, data)
    if recipe.kv is not None:
        recipe = recipe.model_copy(update={"kv": _checked_kv(recipe.kv, document)})
    if chain and recipe.name != path.stem:
        raise RecipeError(f"{path} calls itself {recipe.name!r}",
                          why="a recipe in a recipe folder is found by its file's name",
                          next=f"write 'name: {path.stem}' on line {document.line(('name',))}")
    if parent is not None:
        recipe = _extend(recipe, _load_parent(parent, document, chain))
    if not (recipe.rules or recipe.candidates):
        raise RecipeError(f"{path} has no rules", why="a recipe without rules does nothing",
                          next="quantkit recipes show int8")
    return recipe


def _checked_kv(text: str, document: YamlDocument) -> str:
    """The KV setting in its canonical spelling. Raises RecipeError."""
    from quantkit.kv.build import check_kv

    try:
        spec = parse_kv(text)
        check_kv(spec)
    except UsageError as error:
        raise RecipeError(f"{document.label} line {document.line(('kv',))}: {error.what}", why=error.why,
                          next=error.next) from None
    return str(spec)


def _load_parent(parent: object, document: YamlDocument, chain: tuple[str, ...]) -> Recipe:
    at = f"{document.label} line {document.line(('extends',))}"
    if not isinstance(parent, str) or not _NAME.fullmatch(parent) or _is_path(parent):
        raise RecipeError(f"{at}: extends {parent!r} is not a recipe's name",
                          why="a recipe extends another by its plain name, never by a path",
                          next="quantkit recipes list")
    if parent in chain or len(chain) >= MAX_EXTENDS:
        raise RecipeError(f"{at}: extends goes round in a circle or too deep",
                          why=" → ".join((*chain, parent)), next=f"edit {document.label}")
    return _load(_find(parent), (*chain, parent))


def _extend(child: Recipe, parent: Recipe) -> Recipe:
    """The child's rules are asked first; its other fields replace the parent's where it gives them."""
    fields = {field: getattr(child, field) for field in child.model_fields_set}
    return parent.model_copy(update=fields | {"rules": child.rules + parent.rules})
