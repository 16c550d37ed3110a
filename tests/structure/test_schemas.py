"""Schemas of which llguidance keeps a part: what is left out, and where the rest is refused."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from quantkit.structure.grammar import Structure
from quantkit.structure.schemas import arguments_schema, path_text, rebased, resolved, widened
from quantkit.structure.turns import Tool, TurnFormat
from quantkit.support.errors import UsageError

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
LARGEST = 2**63 - 1
HERMES = TurnFormat("hermes")


@pytest.fixture(scope="session")
def follows(compilers, real):
    """``follows(structure, text)``: whether a whole answer is allowed."""
    def follows(structure, text, format=HERMES):
        constraint = compilers("real", format).compile(structure)()
        for token in real.tokenizer.encode(text, special=False):
            if not torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[token]):
                return False
            constraint.accept(token)
        scores = constraint.mask(torch.zeros(real.config.vocab_size))
        return constraint.ended or bool(torch.isfinite(scores[min(real.tokenizer.eos_ids)]))

    return follows


def prop(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


WIDENED = {
    "zod's email": (prop({"type": "string", "format": "email", "pattern": EMAIL}), ["$.properties.a.pattern"],
                    '{"a": "x@y.co"}', '{"a": "x"}'),
    "pydantic's Decimal": (prop({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}),
                           ["$.properties.a.anyOf[1].pattern"], '{"a": "1.5"}', '{"a": null}'),
    "unique": (prop({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
               ["$.properties.a.uniqueItems"], '{"a": [1, 1]}', '{"a": ["1"]}'),
    "names": ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"const": 1}},
              ["$.propertyNames"], '{"y": 1}', '{"y": 2}'),
    "names that are strings": ({"type": "object", "propertyNames": {"type": "string"}}, [], '{"y": 1}', "[]"),
    "a format": (prop({"type": "string", "format": "byte"}), ["$.properties.a.format"], '{"a": "x"}',
                 '{"a": 1}'),
    "a format of integers": (prop({"type": "integer", "format": "int64"}), [], '{"a": 1}', '{"a": "1"}'),
    "in a definition": ({"$ref": "#/$defs/E", "$defs": {"E": {"type": "string", "pattern": "a(?=b)"},
                                                        "unused": {"not": {}}}},
                        ["$.$defs.E.pattern"], '"x"', "1"),
    "all of": ({"allOf": [{"type": "object", "not": {"required": ["x"]}}, {"required": ["b"]}]},
               ["$.allOf[0].not"], '{"b": 1}', "{}"),
    "keys by patterns": ({"type": "object", "patternProperties": {"^(?!x)": {"const": 1}},
                          "additionalProperties": False},
                         ['$.patternProperties["^(?!x)"]'], '{"b": 1}', "[]"),
    "overlapping patterns": ({"type": "object", "patternProperties": {"^a": {}, "^ab": {"const": 1}},
                              "additionalProperties": False}, ["$.patternProperties"], '{"a": 1}', "[]"),
    "overlapping oneOf": (prop({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
                          ["$.properties.a.oneOf"], '{"a": "xy"}', '{"a": 3}'),
    "a wrong expression": (prop({"type": "string", "pattern": "["}), ["$.properties.a.pattern"], '{"a": "x"}',
                           '{"a": 1}'),
    "a wrong type": (prop({"type": "strnig", "title": "x"}), ["$.properties.a.type"], '{"a": "x"}', "{}"),
    "an older required": ({"type": "object", "properties": {"a": {"type": "null", "required": True}},
                           "required": ["a"]}, ["$.properties.a.required"], '{"a": null}', "{}"),
    "elsewhere": (prop({"$ref": "https://example.org/s.json"}), ["$.properties.a.$ref"], '{"a": 3}', "{}"),
    "a large constant": (prop({"enum": [2**60 + 1, "x"]}), ["$.properties.a.enum"], f'{{"a": {2**60 + 1}}}',
                         '{"a": null}'),
    "counts as floats": ({"type": "array", "minItems": 1.0}, [], "[1]", "[]"),
    "a large bound": (prop({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
                      ["$.properties.a.maximum"], f'{{"a": {2**64}}}', '{"a": -1}'),
    "large bounds of numbers": (prop({"type": "number", "minimum": -2**63, "exclusiveMaximum": 3}),
                                ["$.properties.a.minimum"], '{"a": -1000.5}', '{"a": 3}'),
    "more than one": (prop({"type": "array", "contains": {}, "uniqueItems": True}),
                      ["$.properties.a.contains", "$.properties.a.uniqueItems"], '{"a": []}', '{"a": 1}'),
}


@pytest.mark.parametrize(("schema", "paths", "good", "bad"), WIDENED.values(), ids=WIDENED)
def test_what_cannot_be_kept_is_left_out_and_the_rest_is_kept(compilers, follows, schema, paths, good, bad):
    structure = Structure(json_schema=schema, strict=False)
    assert compilers("real", HERMES).compile(structure).widened == tuple(f"schema: {path}" for path in paths)
    assert follows(structure, good) and not follows(structure, bad)


@pytest.mark.parametrize(("schema", "paths"), [row[:2] for row in WIDENED.values() if row[1]],
                         ids=[name for name, row in WIDENED.items() if row[1]])
def test_what_cannot_be_kept_of_a_strict_schema_is_refused_with_its_path(compilers, schema, paths):
    tool = Tool("mail", "", schema if schema.get("type") == "object" else prop(schema), strict=True)
    with pytest.raises(UsageError, match="the JSON schema can't be used") as caught:
        compilers("real", HERMES).compile(Structure(json_schema=schema))
    assert all(f"{path}: " in caught.value.why for path in paths)
    if schema.get("type") == "object":
        with pytest.raises(UsageError, match="the schema of mail can't be used") as caught:
            compilers("real", HERMES).compile(Structure(tools=(tool,), tool_choice="required"))
        assert all(f"{path}: " in caught.value.why for path in paths)


@pytest.mark.parametrize(("bounds", "inside", "outside"), [
    ({"minimum": -2**63, "maximum": LARGEST}, [0, LARGEST, 1024 - 2**63], [LARGEST + 1, -2**63 - 1]),
    ({"minimum": 0, "exclusiveMaximum": 2**63}, [0, LARGEST], [-1, 2**63]),
    ({"minimum": -2**53 + 1, "maximum": 2**53 - 1}, [2**53 - 1, 1 - 2**53], [2**53, -2**53]),
    ({"exclusiveMaximum": 2**53 + 3}, [2**53 + 2, -5], [2**53 + 3]),
    ({"exclusiveMinimum": 10**18, "maximum": LARGEST}, [10**18 + 128, LARGEST], [10**18, 3]),
    ({"minimum": -2**63, "exclusiveMinimum": -5, "maximum": 7}, [-4, 7], [-5, 8])])
def test_bounds_of_64_bits_are_kept(compilers, follows, bounds, inside, outside):
    structure = Structure(json_schema={"type": "integer", **bounds})
    assert compilers("real", HERMES).compile(structure).widened == ()
    assert all(follows(structure, str(value)) for value in inside)
    assert not any(follows(structure, str(value)) for value in outside)


def call(arguments, name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(("parameters", "takes_more"), [
    ({}, False), ({"type": "object"}, False), ({"type": "object", "properties": {}, "required": []}, False),
    ({"title": "f", "type": "object", "$schema": "https://json-schema.org/draft/2020-12/schema"}, False),
    ({"type": "object", "additionalProperties": True}, True), ({"additionalProperties": {}}, True),
    ({"type": "object", "minProperties": 1}, True)])
def test_a_tool_without_parameters_takes_an_empty_object(follows, parameters, takes_more):
    for strict in (False, True):
        structure = Structure(tools=(Tool("f", "", parameters, strict),), tool_choice="required")
        assert follows(structure, call("{}")) == ("minProperties" not in parameters)
        assert follows(structure, call('{"x": 1}')) == takes_more


def test_only_the_schema_of_the_tool_that_is_called_counts(compilers):
    good, odd = Tool("good", "", prop({}), True), Tool("odd", "", prop({"not": {}}))
    compiler = compilers("real", HERMES)
    assert compiler.compile(Structure(tools=(good, odd), tool_choice="good")).widened == ()
    assert compiler.compile(Structure(tools=(good, odd), tool_choice="auto")).widened == (
        "tools.odd: $.properties.a.not",)


def test_gemmas_notation_leaves_out_more(compilers):
    schema = {"type": "object", "required": ["a", "b c"], "properties": {
        "a": {"type": "string", "pattern": "x"}, "b c": {"type": "null"}, "d": {"enum": [{}]}}}
    compiler = compilers("real", TurnFormat("gemma", variant="function"))
    paths = ['$.properties.a.pattern', '$.properties["b c"]', "$.properties.d.enum"]
    compiled = compiler.compile(Structure(tools=(Tool("f", "", schema),), tool_choice="f"))
    assert sorted(compiled.widened) == sorted(f"tools.f: {path}" for path in paths)
    with pytest.raises(UsageError, match="the schema of f can't be used") as caught:
        compiler.compile(Structure(tools=(Tool("f", "", schema, strict=True),), tool_choice="f"))
    assert all(path in caught.value.why for path in paths)


def test_references_of_a_tool_within_a_schema_of_ours(follows):
    """Beside an answer with a structure, calls as plain JSON are described by a schema around the tool's."""
    tool = Tool("f", "", {"type": "object", "required": ["a", "b"], "properties": {
        "a": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]},
        "b": {"$ref": "#/properties/a"}}})
    structure = Structure(json_schema=prop({}), tools=(tool,), tool_choice="auto")
    plain = TurnFormat("json")
    text = '{"name": "f", "arguments": {"a": {"x": 1}, "b": %s}}'
    assert follows(structure, text % '{"x": 1}', plain) and not follows(structure, text % "3", plain)


def test_paths_and_references():
    assert path_text(("properties", "a b", "anyOf", 0, "$ref")) == '$.properties["a b"].anyOf[0].$ref'
    assert path_text(("é\n",)) == '$["\\u00e9\\n"]' and path_text(()) == "$"
    root = {"$defs": {"a/b~c d": {"anyOf": [{}]}}}
    assert resolved(root, "#/$defs/a~1b~0c%20d/anyOf/0") == ("$defs", "a/b~c d", "anyOf", 0)
    assert resolved(root, "#") == ()
    assert not any(resolved(root, text) for text in ("#/x", "#x", "http://x", 3))
    moved = rebased({"properties": {"default": {"$ref": "#/$defs/x"}}, "$id": "u", "items": {"$ref": "#"},
                     "default": {"$ref": "#"}, "$defs": {"x": {"$ref": "#/$defs/y"}}}, "#/r")
    assert moved == {"properties": {"default": {"$ref": "#/r/$defs/x"}}, "items": {"$ref": "#/r"},
                     "default": {"$ref": "#"}, "$defs": {"x": {"$ref": "#/r/$defs/y"}}}
    assert arguments_schema({"properties": {"a": {}}}) == {"type": "object", "properties": {"a": {}}}


UNREADABLE = {"elsewhere", "a wrong expression", "a wrong type", "an older required"}
"""Schemas that jsonschema refuses too."""


@pytest.mark.parametrize("name", sorted(WIDENED.keys() - UNREADABLE))
def test_widening_excludes_nothing(name):
    schema = WIDENED[name][0]
    before = json.dumps(schema)
    wider, _ = widened(schema)
    assert json.dumps(schema) == before, "the given one stays as it is"
    texts = [text for row in WIDENED.values() for text in row[2:]]
    fitting = [text for text in texts if jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))]
    assert all(jsonschema.Draft202012Validator(wider).is_valid(json.loads(text)) for text in fitting)
