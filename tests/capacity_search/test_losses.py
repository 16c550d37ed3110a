"""Every figure is one that was measured: it stands in the file that it cites."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.capacity_search import losses as module
from quantkit.capacity_search.losses import losses
from quantkit.kv.spec import parse_kv
from quantkit.quantization.recipe import list_recipes
from quantkit.support.errors import QuantkitError

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {**{f"weights {name}": one for name, one in losses().weights.items() if one.kl},
           **{f"kv {name}": one for name, one in losses().kv.items() if one.kl}}


def numbers(data: object) -> Iterator[float]:
    if isinstance(data, dict):
        for value in data.values():
            yield from numbers(value)
    elif isinstance(data, list):
        for value in data:
            yield from numbers(value)
    elif isinstance(data, float):
        yield data


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_stands_where_it_says(name):
    one = FIGURES[name]
    terms = [float(text) for text in re.findall(r"\d+\.\d+", one.note)] or [one.kl]
    assert sum(terms) == pytest.approx(one.kl)
    if one.source.startswith("docs/"):
        page = (ROOT / one.source).read_text(encoding="utf-8")
        # a figure of three digits may stand there with four
        there = [float(text) for text in re.findall(r"(?<![\d.])0\.\d+", page)]
    else:
        there = list(numbers(json.loads((ROOT / "evals/results" / one.source).read_bytes())))
    for term in terms:
        assert f"{term:.3g}" in {f"{value:.3g}" for value in there}, f"{term} in {one.source}"


def test_names_are_those_of_recipes_and_settings():
    recipes = {info.name for info in list_recipes()} | {"none"}
    assert set(losses().weights) <= recipes
    assert all(str(parse_kv(name)) == name for name in losses().kv)
    assert losses().of_weights("int8") == 0.00322 and losses().of_weights("mine") is None
    assert losses().of_kv("none") == 0 and losses().of_kv("window(8)") is None


def test_what_drops_tokens_has_no_figure():
    """Its loss depends on the text's length: one number would be made up."""
    assert all(parse_kv(name).policy == "all" for name in losses().kv)


def test_an_install_without_the_file_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "data_dir", lambda kind: tmp_path)
    module.losses.cache_clear()
    try:
        with pytest.raises(QuantkitError, match=r"losses\.json can't be read"):
            losses()
    finally:
        module.losses.cache_clear()
