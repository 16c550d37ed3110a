"""What strangers ask for is bounded: sizes before anything is read, then time and memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError

from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.serving.openai.generation import Choices
from quantkit.structure.base import ConstraintError
from quantkit.structure.grammar import (
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR,
    MAX_REGEX,
    MAX_SCHEMA,
    Structure,
)
from quantkit.structure.turns import Tool, TurnFormat
from quantkit.support import isolation
from quantkit.support.errors import UsageError


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


LARGE = {
    "deep": Structure(json_schema=nested(MAX_DEPTH + 5)),
    "endlessly deep": Structure(json_schema=nested(20_000)),
    "long": Structure(json_schema={"const": "x" * MAX_SCHEMA}),
    "wide": Structure(json_schema={"enum": list(range(30_000))}),
    "regex": Structure(regex="a" * (MAX_REGEX + 1)), "grammar": Structure(grammar="#" * (MAX_GRAMMAR + 1)),
    "choice": Structure(choice=("a",) * (MAX_CHOICES + 1)), "no choice": Structure(choice=()),
    "empty": Structure(choice=("a", "")),
}


@pytest.mark.parametrize("structure", LARGE.values(), ids=LARGE)
def test_what_is_too_large_is_refused_before_anything_is_done(compilers, monkeypatch, structure):
    monkeypatch.setattr("quantkit.support.isolation.call", None)
    with pytest.raises(UsageError, match="allowed"):
        compilers("tiny").compile(structure)


def test_the_largest_choice_compiles(compilers):
    choice = Structure(choice=tuple(f"{number} " + "x" * 30 for number in range(MAX_CHOICES)))
    assert not compilers("tiny").compile(choice)().ended
    accepted = TypeAdapter(Choices)
    assert accepted.validate_python(list(choice.choice)) == list(choice.choice)
    with pytest.raises(ValidationError, match=f"at most {MAX_CHOICES} items"):
        accepted.validate_python([*choice.choice, "x"])


def chain(count, upper):
    name = "R" if upper else "r"
    more = " /x/" if upper else ""
    rules = "".join(f"{name}{number}: {name}{number + 1}{more}\n" for number in range(count))
    return f'start: {name}0\n{rules}{name}{count}: "a"\n'


HOSTILE = {
    "multiples": Structure(json_schema={"allOf": [{"type": "integer", "multipleOf": number}
                                                  for number in (97, 101, 103, 107)]}),
    "a multiple": Structure(json_schema={"type": "integer", "multipleOf": 9_999_991}),
    "a chain of rules": Structure(grammar=chain(3000, False)),
    "a chain of terminals": Structure(grammar=chain(3000, True)),
    "doubled terminals": Structure(grammar="start: R0\n" + "".join(
        f"R{number}: R{number + 1} R{number + 1}\n" for number in range(22)) + 'R22: "a"\n'),
    "parentheses": Structure(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "ebnf parentheses": Structure(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "regex parentheses": Structure(regex="(" * 4000 + "a" + ")" * 4000),
    "ambiguous": Structure(grammar="start: a\na: a a | /[a-z ]/ | a a a\n"),
    "intersections": Structure(grammar="start: T\nT: " + " & ".join(
        f"/(.|\\n)*{'abcdefghij'[number % 10]}(.|\\n){{{number + 5}}}/" for number in range(60)) + "\n"),
    "states": Structure(regex="((.|\n)*a(.|\n){200}c|(.|\n)*b(.|\n){201}d)"),
    "repeats": Structure(regex="((a{1,1000}){1,1000}b?){1,1000}"),
    "length": Structure(json_schema={"type": "string", "minLength": 10**9}),
    "items": Structure(json_schema={"type": "array", "minItems": 10**9}),
    "optional properties": Structure(json_schema={"properties": {f"p{n}": {} for n in range(3000)}}),
    "doubled references": Structure(json_schema={"$ref": "#/$defs/d0", "$defs": {
        f"d{n}": {"properties": {f"x{n}": {"$ref": f"#/$defs/d{n + 1}"}},
                  "allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": {}}}),
    "products": Structure(json_schema={"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"a{n}{m}": {}}, "required": [f"a{n}{m}"]} for m in range(3)]}
        for n in range(12)]}),
}


HOSTILE |= {f"{name}, not strict": replace(structure, strict=False) for name, structure in HOSTILE.items()
            if structure.json_schema is not None}
HOSTILE["faults everywhere"] = Structure(strict=False, json_schema={"properties": {
    f"p{n}": {"items": {"type": "string", "pattern": "["}} for n in range(500)}})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("structure", HOSTILE.values(), ids=HOSTILE)
def test_hostile_structures_end_soon(compilers, tiny, structure):
    """Refused, or at work for some tokens and then refused, or bounded; the next request is served."""
    engine = Engine(tiny)
    try:
        make = compilers("tiny").compile(structure)
    except UsageError as error:
        assert error.why
    else:
        errors = []
        engine.submit([5], Sampling(max_tokens=200, temperature=3.0, seed=1), constraint=make(),
                      on_error=errors.append)
        while engine.step():
            pass
        assert all(isinstance(error, ConstraintError) for error in errors)
    make = compilers("tiny").compile(Structure(regex="ab"))
    request = engine.submit([5], Sampling(max_tokens=9), constraint=make())
    while engine.step():
        pass
    assert request.result.text == "ab"


def test_a_constraint_that_takes_too_long_fails_alone(tiny, compilers, monkeypatch):
    monkeypatch.setattr("quantkit.structure.grammar.FREE_SECONDS", 0.0)
    monkeypatch.setattr("quantkit.structure.grammar.SECONDS_PER_TOKEN", 0.0)
    engine, errors = Engine(tiny), []
    engine.submit([5], Sampling(max_tokens=50), on_error=errors.append,
                  constraint=compilers("tiny").compile(Structure(json_object=True))())
    other = engine.submit([5], Sampling(max_tokens=5, ignore_eos=True))
    while engine.step():
        pass
    assert len(errors) == 1 and "too much work" in str(errors[0])
    assert len(other.result.token_ids) == 5


def test_once_the_time_is_up_no_more_schemas_are_looked_at(compilers, monkeypatch):
    now, asked, real = 0.0, [], isolation.call

    def call(function, arguments, **limits):
        nonlocal now
        if "structure.trial" not in function:  # of the tokenizer's template
            return real(function, arguments, **limits)
        now += 2
        asked.append(function.rpartition(":")[2])
        return {"error": "refused", "faults": [], "schema": arguments.get("schema")}

    compiler = compilers("real", TurnFormat("hermes"))
    monkeypatch.setattr("quantkit.support.isolation.call", call)
    monkeypatch.setattr("quantkit.structure.grammar.time", SimpleNamespace(monotonic=lambda: now))
    tools = tuple(Tool(f"tool{number}", "", {"type": "object"}) for number in range(9))
    with pytest.raises(UsageError, match="refused"):
        compiler.compile(Structure(tools=tools, tool_choice="required"))
    assert asked == ["trial", "widen"]
