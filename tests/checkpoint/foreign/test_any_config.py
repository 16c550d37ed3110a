"""Whatever stands in a stranger's quantization_config: it opens, or an error says what to do."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.open import open_checkpoint
from quantkit.quantization.run import quantize
from quantkit.support.errors import QuantkitError

LEAVES = st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.sampled_from(
    ["", "gptq", "Linear", "re:.*", "re:(", "group", "tensor", "pack-quantized", "nf4", "lm_head", "\0"])
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["bits", "targets", "weights", "format", "-:.*", "+:.*q_proj", "x", "num_bits"]), inner,
    max_size=3), max_leaves=6)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """One checkpoint a ``quant_method``, without its manifest."""
    made, place = {}, tmp_path_factory.mktemp("any")
    for form, spec in (("gptq", "bits: 4, granularity: {strategy: group, size: 32}"),
                       ("awq", "bits: 4, symmetric: false, granularity: {strategy: group, size: 32}"),
                       ("pack-quantized", "bits: 8, granularity: {strategy: channel}"),
                       ("int-quantized", "bits: 8, granularity: {strategy: channel}, activations: token"),
                       ("float-quantized", "kind: fp, bits: 8, granularity: {strategy: tensor}"),
                       ("mlx", "bits: 4, granularity: {strategy: group, size: 32}"),
                       ("bnb-int8", "bits: 8, granularity: {strategy: channel}")):
        recipe = place / f"{form}.yaml"
        recipe.write_text("rules:\n  - {match: lm_head}\n"
                          f"  - {{match: '*', method: rtn, format: {form}, spec: {{{spec}}}}}\n")
        made[form] = quantize(str(tiny), str(recipe), place / form).out
        (made[form] / "quantkit.json").unlink()
    return {form: (folder, (folder / "config.json").read_text()) for form, folder in made.items()}


def paths(value: Any, at: tuple = ()) -> list[tuple]:
    """Of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, one in inner for path in paths(one, (*at, key)))]


@settings(max_examples=250, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), form=st.sampled_from(
    ["gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "mlx", "bnb-int8"]))
def test_it_opens_or_says_why_not(folders, data, form):
    folder, text = folders[form]
    config = json.loads(text)
    changed = copy.deepcopy(config["quantization_config"])
    where = data.draw(st.sampled_from([path for path in paths(changed) if path] + [("new",)]))
    inside = changed
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = data.draw(VALUES)
    words = {key: changed for key in ("quantization", "quantization_config") if key in config}
    (folder / "config.json").write_text(json.dumps(config | words))
    try:
        with open_checkpoint(folder) as opened:
            for row in opened.layers[:2]:
                opened.quantized(row.name)
    except QuantkitError as error:
        assert error.next, error
    finally:
        (folder / "config.json").write_text(text)
