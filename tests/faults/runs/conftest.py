"""Real runs of a tiny model: every registered method, of plugins too, in every layout that holds it."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint import durable
from quantkit.formats.spec import GROUP_SCALES, Granularity, QuantSpec
from quantkit.plugins.manager import PluginManager, current
from quantkit.quantization.recipe import CalibrationSpec, list_recipes
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError
from quantkit.testing import METHOD_SPECS, tiny_model

TEXT = "The cat sat on the mat, and the other one in the house is out of the rain. " * 40
SMALL = {"windows": 4, "window": 16}
SHAPE = (64, 64)


@dataclass(frozen=True)
class Case:
    """One way to quantize: a method and a layout, or a recipe that is shipped."""

    name: str
    recipe: str | dict[str, Any]
    method: str | None = None
    format: str | None = None


def _hqq() -> Any:
    return pytest.importorskip("quantkit_hqq", reason="the plugin quantkit-hqq isn't here")


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """Plugins of this repository, beside the built-ins."""
    current.cache_clear()
    current().add(_hqq(), "quantkit-hqq", version="0.1")
    current().add(pytest.importorskip("quantkit_recover"), "quantkit-recover", version="0.1")
    yield
    current.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The threads of torch's pools don't survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _specs() -> list[QuantSpec]:
    """What methods are asked for in their contract, and each with quantized activations where that exists."""
    found = [spec if spec.scale_dtype in GROUP_SCALES else
             spec.model_copy(update={"scale_dtype": "float32" if spec.kind == "nf" else "model"})
             for spec in METHOD_SPECS]
    for spec in tuple(found):
        if spec.kind in ("int", "fp") and spec.bits == 8 and spec.symmetric and not spec.granularity.size:
            found.append(spec.model_copy(update={"activations": "token"}))
    group, square = Granularity(strategy="group", size=32), Granularity(strategy="tile", size=128)
    found += [QuantSpec(bits=4, symmetric=False, minimum=True, granularity=group),
              QuantSpec(kind="fp", bits=4, granularity=group, scale_dtype="e8m0"),
              QuantSpec(kind="fp", bits=8, granularity=square, activations="group")]
    return found


def own_spec(form: object) -> list[QuantSpec]:
    """The spec of a format that can hold no other."""
    spec = getattr(form, "spec", None)
    return [] if spec is None else [spec]


def cases() -> list[Case]:
    """A case for every method and every format that holds what the method makes."""
    manager = PluginManager([])
    manager.add(_hqq(), "quantkit-hqq", version="0.1")
    methods, formats = manager.registries["methods"], manager.registries["formats"]
    found = []
    for method, form in ((m, f) for m in sorted(methods) for f in sorted(formats)):
        for spec in (*_specs(), *own_spec(formats.get(form))):
            if methods.get(method).reason_against(spec) or formats.get(form).reason_against(spec, SHAPE):
                continue
            recipe = {"rules": [{"match": "lm_head", "optional": True},
                                {"match": "*", "method": method, "format": form,
                                 "spec": spec.model_dump(mode="json", exclude_none=True)}]}
            if methods.get(method).needs:
                recipe["calibration"] = SMALL
            found.append(Case(f"{method}-{form}", recipe, method, form))
            break
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(), ids=lambda case: case.name)
    if "shipped" in metafunc.fixturenames:
        names = sorted(info.name for info in list_recipes())
        metafunc.parametrize("shipped", [Case(name, name) for name in names], ids=names)


@pytest.fixture(scope="package")
def every_case() -> list[Case]:
    """All of them."""
    return cases()


@dataclass
class Run:
    """A run that can be made again and again; by construction each call makes the same bytes."""

    start: Callable[[Path], object]
    folder: Path
    bytes_of: Callable[[Path], dict[str, bytes]]
    steps: list[str] = field(default_factory=list)

    def __call__(self, out: Path) -> None:
        self.start(out)

    @cached_property
    def reference(self) -> dict[str, bytes]:
        """The files of an undisturbed run; notes its write points."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "step", self.steps.append)
            self.start(self.folder / "undisturbed")
        return self.bytes_of(self.folder / "undisturbed")

    def points(self, count: int) -> list[int]:
        """Some write points, spread over the run, others for other runs."""
        assert self.reference
        chance = random.Random(hashlib.sha256(self.folder.name.encode()).digest())
        edges = [len(self.steps) * i // count for i in range(count + 1)]
        return [chance.randrange(low, high) for low, high in itertools.pairwise(edges)]

    def again(self, out: Path) -> None:
        """Run to the end, which may have been reached already; the bytes must be the undisturbed run's."""
        over = out.exists() and not (out.with_name(out.name + ".partial") / "state.json").exists()
        try:
            self.start(out)
            assert not over
        except CheckpointError as error:
            assert over and "already exists" in str(error), error
        assert self.bytes_of(out) == self.reference
        assert [p.name for p in out.parent.iterdir()] == [out.name], "nothing else is left"


@pytest.fixture(scope="package")
def figures() -> Iterator[dict[str, Any]]:
    """Counts of the slow tests, printed as JSON when all have run: ``pytest -s``."""
    found: dict[str, Any] = {}
    yield found
    if found:
        print("\n" + json.dumps(found, indent=1))


@pytest.fixture(scope="package")
def text(tmp_path_factory) -> Path:
    """Calibration text."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="package")
def tiny(tmp_path_factory) -> Path:
    """Two layers, each of whose Linears has at least 64 rows, which trellises want."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, intermediate_size=64,
                      num_attention_heads=2, num_key_value_heads=2)


@pytest.fixture(scope="package")
def run_by(tmp_path_factory, contents) -> Callable[[str, Callable[[Path], object]], Run]:
    """``run_by(name, start)``: the run that ``start(out)`` makes, one for all tests."""
    made: dict[str, Run] = {}

    def by(name: str, start: Callable[[Path], object]) -> Run:
        if name not in made:
            folder = tmp_path_factory.mktemp("run") / name
            folder.mkdir()
            made[name] = Run(start, folder, contents)
        return made[name]

    return by


@pytest.fixture(scope="package")
def run_from(tiny, text, tmp_path_factory, run_by) -> Callable[[str, dict[str, Any]], Run]:
    """``run_from(name, recipe)``: a quantization of the tiny model, calibrated on a text of ours."""

    def of(name: str, recipe: dict[str, Any]) -> Run:
        if "calibration" in recipe:
            recipe = recipe | {"calibration": {"text": str(text), **recipe["calibration"]}}
        run = run_by(name, lambda out: quantize(str(tiny), str(path), out))
        path = run.folder / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        return run

    return of


@pytest.fixture(scope="package")
def run_of(tiny, text, run_by, run_from) -> Callable[[Case], Run]:
    """``run_of(case)``: its run."""
    calibration = CalibrationSpec(text=str(text), **SMALL)

    def of(case: Case) -> Run:
        if isinstance(case.recipe, dict):
            return run_from(case.name, case.recipe)
        return run_by(case.name, lambda out: quantize(str(tiny), case.recipe, out, calibration=calibration))

    return of
