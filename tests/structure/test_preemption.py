"""A constrained answer whose request gives up its pages goes on as if nothing had been."""

from __future__ import annotations

import re

import pytest

from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.structure.grammar import Structure
from quantkit.structure.turns import Tool, TurnFormat

PROMPT, OTHER = list(range(5, 205)), list(range(9, 209))
FORMS = {
    "regex": Structure(regex="([a-z]{3}-){9}[0-9]+!"),
    "schema": Structure(json_schema={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 12,
                                     "maxItems": 12}),
    "calls": Structure(tools=(Tool("f", parameters={"type": "object", "properties": {
        "x": {"type": "array", "items": {"type": "boolean"}, "minItems": 9, "maxItems": 9}},
        "required": ["x"], "additionalProperties": False}),), tool_choice="f"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_tokens_after_a_preemption(tiny, compilers, form, temperature):
    make = compilers("tiny", TurnFormat("hermes")).compile(FORMS[form])
    sampling = Sampling(max_tokens=90, temperature=temperature, seed=3)
    alone = Engine(tiny)
    expected = alone.submit(PROMPT, sampling, constraint=make())
    while alone.step():
        pass

    # pages for one of both requests
    engine = Engine(tiny, max_batch=4, context=400, memory=400 * alone.cache.bytes_per_token)
    request = engine.submit(PROMPT, sampling, constraint=make(), priority=5)
    while len(request.result.token_ids) < 20:
        assert engine.step()
    urgent = engine.submit(OTHER, Sampling(max_tokens=20, ignore_eos=True), priority=-1)
    while engine.step():
        pass
    assert request.kv.preemptions == 1 and urgent.kv.preemptions == 0
    assert request.result.token_ids == expected.result.token_ids
    assert request.result.finish_reason == expected.result.finish_reason
    if form == "regex":
        assert re.fullmatch(r"([a-z]{3}-){9}[0-9]+(!)?", request.result.text)
