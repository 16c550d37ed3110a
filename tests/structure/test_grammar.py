"""What a model writes under a structure has that structure."""

from __future__ import annotations

import json
import re
import sys
import threading

import jsonschema
import pytest
import torch

from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.structure.base import ConstraintError
from quantkit.structure.grammar import (
    Compiler,
    Structure,
)
from quantkit.structure.schemas import closed
from quantkit.structure.turns import MISTRAL_THINK, THINK, Tool, TurnFormat, parser
from quantkit.support.errors import UsageError

PLAIN = TurnFormat("json")


@pytest.fixture(scope="session")
def write(tiny, real, compilers):
    """``write("tiny", structure)``: what a model writes under it, and why it ended."""
    engines = {"tiny": Engine(tiny), "real": Engine(real)}

    def write(model, structure, prompt="Hello", format=PLAIN, **sampling):
        engine = engines[model]
        make = compilers(model, format).compile(structure)
        request = engine.submit(engine.loaded.tokenizer.encode(prompt),
                                Sampling(**({"max_tokens": 300} | sampling)), constraint=make())
        while engine.step():
            pass
        return request.result.text, request.result.finish_reason

    return write


WORD = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "constants": {"enum": ["a", 1, None, {"b": [True]}]},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 1234},
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2, "multipleOf": 0.25},
    "date": {"type": "string", "format": "date"},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    "object": {"type": "object", "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0,
                                                                      "maximum": 150}},
               "required": ["name", "age"], "additionalProperties": False},
    "optional": {"type": "object", "properties": {"a": {"const": 1}, "b": WORD, "c": {"type": "null"}},
                 "required": ["b"], "additionalProperties": False},
    "nested": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/inner"}}, "required": ["inner"],
               "additionalProperties": False,
               "$defs": {"inner": {"type": "object", "properties": {"x": {"enum": ["p", "q"]}},
                                   "required": ["x"], "additionalProperties": False}}},
    "recursive": {"$defs": {"node": {"type": "object", "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"],
        "additionalProperties": False}}, "$ref": "#/$defs/node"},
    "any of": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, WORD, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": WORD}, "required": ["a"]},
                         {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
               "unevaluatedProperties": False} | {"additionalProperties": True},
    "keys with quotes": {"type": "object", "properties": {'a"\\\n/é': {"const": '</x>"'}},
                         "required": ['a"\\\n/é'], "additionalProperties": False},
}
del SCHEMAS["all of"]["unevaluatedProperties"]


def check(text, reason, schema):
    if reason == "length":  # cut off: it must be the beginning of what fits
        assert text and not text.isspace()
        return False
    assert reason == "stop"
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_model_of_random_weights_writes_json_by_the_schema(write, schema):
    complete = 0
    for seed in range(4):
        sampling = {"temperature": 1.0, "seed": seed} if seed else {}
        complete += check(*write("tiny", Structure(json_schema=schema), f"{seed} <|im_start|> x", **sampling),
                          schema)
    assert complete >= 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize("prompt", ["Describe a person as JSON:", "def f(x):", "Once upon a time"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_real_model_writes_json_by_the_schema(write, schema, prompt):
    assert check(*write("real", Structure(json_schema=schema), prompt, max_tokens=80), schema) or schema in (
        SCHEMAS["recursive"], SCHEMAS["all of"])


def test_any_object(write):
    for seed in range(1, 4):
        text, reason = write("real", Structure(json_object=True), "A person:", temperature=1.0, seed=seed,
                             max_tokens=60)
        assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))


@pytest.mark.parametrize("model", ["tiny", "real"])
@pytest.mark.parametrize("regex", [r"\d{4}-\d{2}/[a-f]{2}", r"(yes|no)\.", "^ab?$", r"é{3}\\\n[/]",
                                   "[^a-z ]{5}"])
def test_a_regular_expression_matches_as_a_whole(write, model, regex):
    for sampling in ({}, {"temperature": 2.0, "seed": 3}):
        text, reason = write(model, Structure(regex=regex), **sampling)
        assert reason == "stop" and re.fullmatch(regex, text)


@pytest.mark.parametrize("model", ["tiny", "real"])
def test_a_choice(write, model):
    choice = ('say "no"\\', "yes", "ye", "日本\n", "</s>{}")
    for seed in range(1, 6):
        text, reason = write(model, Structure(choice=choice), temperature=3.0, seed=seed)
        assert reason == "stop" and text in choice


@pytest.mark.parametrize("model", ["tiny", "real"])
@pytest.mark.parametrize("grammar", ['start: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,2}/\n',
                                     'root ::= number ("+" number) ("+" number)?\nnumber ::= [0-9] [0-9]?\n'])
def test_a_grammar(write, model, grammar):
    text, reason = write(model, Structure(grammar=grammar))
    assert reason == "stop" and re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,3}", text)


FORMATS = [TurnFormat("hermes"), TurnFormat("llama3"), TurnFormat("json"),
           TurnFormat("mistral", variant="list"), TurnFormat("mistral", variant="args"),
           TurnFormat("mistral", variant="call_id"),
           TurnFormat("gemma", variant="function"), TurnFormat("gemma", variant="4")]
STRICT = [Tool("get_weather", "", {"type": "object", "properties": {
    "city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city", "exact"], "additionalProperties": False}, strict=True),
    Tool("time", "", {"properties": {}, "additionalProperties": False}, strict=True)]


def calls(format, text, tools=STRICT, opened=False):
    turn = parser(format, tools, opened)
    deltas, parsed = turn.push(text) + turn.finish(), []
    for delta in deltas:
        if getattr(delta, "name", None):
            parsed.append([delta.name, ""])
        if hasattr(delta, "arguments"):
            parsed[-1][1] += delta.arguments
    return parsed, "".join(delta.text for delta in deltas if hasattr(delta, "text"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name + format.variant)
@pytest.mark.parametrize("choice", ["required", "get_weather", "time"])
def test_required_calls_are_calls_by_the_schema(write, format, choice):
    for model, parallel in (("tiny", False), ("real", False), ("real", True)):
        structure = Structure(tools=tuple(STRICT), tool_choice=choice, parallel_tool_calls=parallel)
        text, reason = write(model, structure, "Weather in Paris?", format, max_tokens=120, temperature=1.0,
                             seed=1)
        parsed, rest = calls(format, text)
        assert parsed and (not rest.strip() or reason == "length")
        assert len(parsed) == 1 or (parallel and choice == "required")
        assert reason == "stop" or parallel or model == "tiny"
        for name, arguments in parsed if reason == "stop" else parsed[:-1]:
            assert choice in ("required", name)
            schema = next(tool.parameters for tool in STRICT if tool.name == name)
            jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name + format.variant)
def test_free_text_in_which_a_call_that_begins_must_be_one(compilers, real, format):
    """Tokens of our choice, as far as the constraint allows them."""
    tokenizer = real.tokenizer
    make = compilers("real", format).compile(Structure(tools=tuple(STRICT), tool_choice="auto"))
    begin = {"hermes": "Sure. <tool_call>\n", "llama3": "{", "json": "{", "mistral": "Ok[TOOL_CALLS]",
             "gemma": "Ok <start_function_call>call:"}[format.name]
    if format.variant == "4":
        begin = "Ok <|tool_call>call:"

    def follows(text):
        constraint = make()
        for token in tokenizer.encode(text, special=False):
            if not torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[token]):
                return False
            constraint.accept(token)
        return True

    assert follows("Hello, [1] {2} and so on.") and follows(begin)
    for wrong in ('"name": "rm", ', "rm", '[{"name": "rm", ', "</tool_call>"):
        assert not follows(begin + wrong)
    constraint = make()
    end = next(iter(tokenizer.eos_ids))
    assert torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[end])
    for token in tokenizer.encode(begin, special=False):
        constraint.accept(token)
    assert not torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[end])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reasoning", [THINK, MISTRAL_THINK])
@pytest.mark.parametrize("structure", [{"json_schema": SCHEMAS["object"]}, {"grammar": 'start: "a" "b"\n'},
                                       {"tools": tuple(STRICT), "tool_choice": "time"}])
def test_reasoning_before_a_structure(compilers, real, reasoning, structure):
    format = TurnFormat("hermes", reasoning)
    compiler, size = compilers("real", format), real.config.vocab_size
    answer = {"json_schema": '{"name": "a", "age": 3}', "grammar": "ab", "tools": (
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')}[next(iter(structure))]
    thoughts = 'Let me think: {"no": <x ab'
    for options, text, good in (
            ({"reasoning": True}, f"{reasoning[0]}\n{thoughts}\n{reasoning[1]}\n\n{answer}", True),
            ({"reasoning": True}, answer, True), ({"reasoning": True}, thoughts, False),
            ({"prompt_opens_reasoning": True}, f"{thoughts}{reasoning[1]}{answer}", True),
            ({}, f"{reasoning[0]}a{reasoning[1]}{answer}", False), ({}, answer, True)):
        constraint = compiler.compile(Structure(**structure, **options))()
        tokens = real.tokenizer.encode(text, special=False)
        allowed = 0
        for token in tokens:
            if constraint.ended or not torch.isfinite(constraint.mask(torch.zeros(size))[token]):
                break
            constraint.accept(token)
            allowed += 1
        assert (allowed == len(tokens) and constraint.ended) == good


def test_the_end_is_allowed_only_where_the_grammar_is_complete(compilers, tiny):
    constraint = compilers("tiny").compile(Structure(regex="ab?c?"))()
    ends = sorted(tiny.tokenizer.eos_ids)
    a, b, c = (tiny.tokenizer.encode(letter, special=False)[0] for letter in "abc")
    scores = torch.zeros(tiny.config.vocab_size)
    assert torch.isfinite(constraint.mask(scores)).nonzero().flatten().tolist() == [a]
    constraint.accept(a)
    assert set(torch.isfinite(constraint.mask(scores)).nonzero().flatten().tolist()) == {b, c, *ends}
    constraint.accept(c)
    assert constraint.ended


def test_logits_wider_than_the_vocabulary(compilers, tiny):
    constraint = compilers("tiny").compile(Structure(regex="[a-z]"))()
    masked = constraint.mask(torch.zeros(tiny.config.vocab_size + 77))
    assert masked.shape[0] == tiny.config.vocab_size + 77 and torch.isfinite(masked).sum() == 26
    assert not torch.isfinite(masked[tiny.config.vocab_size:]).any()


def test_a_token_that_does_not_follow(compilers, tiny):
    constraint = compilers("tiny").compile(Structure(regex="[a-z]"))()
    with pytest.raises(ConstraintError):
        constraint.accept(tiny.tokenizer.encode("A", special=False)[0])


def test_every_choice_has_its_own_and_threads_may_share_a_compiler(compilers, tiny):
    compiler, done = compilers("tiny"), []

    def work(number):
        for _ in range(3):
            make = compiler.compile(Structure(regex=f"a{{{1 + number % 2}}}"))
            first, second = make(), make()
            a = tiny.tokenizer.encode("a", special=False)[0]
            first.accept(a)
            assert first.ended == (number % 2 == 0) and not second.ended
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]


def test_the_same_tokens_alone_and_in_company(tiny, compilers):
    structures = [Structure(json_schema=SCHEMAS["object"]), Structure(regex="[a-z ]{30}"), None]
    alone = []
    for group in ([0], [1], [2], [0, 1, 2]):
        engine, requests = Engine(tiny), []
        for number in group:
            make = compilers("tiny").compile(structures[number]) if structures[number] else None
            requests.append(engine.submit([5, 9, number + 3], Sampling(max_tokens=60, presence_penalty=0.3),
                                          constraint=make() if make else None))
        while engine.step():
            pass
        alone.append([request.result.token_ids for request in requests])
    assert alone[3] == [alone[0][0], alone[1][0], alone[2][0]]


REFUSED = {
    "not": ({"not": {"type": "string"}}, "not"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "if": ({"if": {"type": "string"}, "then": {}}, "if"), "contains": ({"contains": {}}, "contains"),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "format": ({"type": "string", "format": "weird"}, "weird"), "lookahead": ({"pattern": "(?=a)b"}, "look"),
    "one of": ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "anyOf"),
    "remote": ({"$ref": "http://127.0.0.1:9/x.json"}, "http"), "type": ({"type": "strnig"}, "strnig"),
    "nothing fits": ({"$ref": "#"}, "no text"),
    "impossible": ({"type": "integer", "minimum": 3, "maximum": 2}, "JSON schema"),
    "our options": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "false": (False, "JSON schema"),
}


@pytest.mark.parametrize(("schema", "word"), REFUSED.values(), ids=REFUSED)
def test_what_is_unsupported_is_named(compilers, schema, word):
    with pytest.raises(UsageError, match=re.escape(word)) as caught:
        compilers("tiny").compile(Structure(json_schema=schema))
    assert len(str(caught.value)) < 700 and "<state>" not in str(caught.value)
    assert schema is False or "$" in caught.value.why or "x-guidance" in str(caught.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name + format.variant)
@pytest.mark.parametrize(("kind", "given", "answer"), [
    ("json_schema", {"properties": {"age": {"type": "integer"}, "name": WORD}, "required": ["age", "name"],
                     "type": "object"}, '{"age": 3, "name": "Bo"}'),
    ("json_schema", SCHEMAS["object"], '{"name": "Bo", "age": 3}'), ("choice", ("yes", "no"), "yes"),
    ("grammar", 'start: "a" "b"\n', "ab")])
def test_calls_or_an_answer_with_a_structure(compilers, real, format, kind, given, answer):
    """Beside tools that may be called, an answer still has its structure."""
    structure = Structure(tools=tuple(STRICT), tool_choice="auto", **{kind: given})
    make = compilers("real", format).compile(structure)

    def follows(text, ends=True):
        constraint, tokens = make(), real.tokenizer.encode(text, special=False)
        for token in tokens if ends else tokens[:-1]:  # the last one may be part of another in a longer text
            if not torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[token]):
                return False
            constraint.accept(token)
        scores = constraint.mask(torch.zeros(real.config.vocab_size))
        return not ends or constraint.ended or bool(torch.isfinite(scores[min(real.tokenizer.eos_ids)]))

    begin = {"hermes": '<tool_call>\n{"name": "time"', "llama3": '{"name": "time"', "json": '{"name": "time"',
             "mistral": "[TOOL_CALLS]", "gemma": "<start_function_call>call:time"}[format.name]
    if format.variant == "4":
        begin = "<|tool_call>call:time"
    assert follows(answer) and follows(begin, ends=False) and not follows(begin)
    assert not follows("Hello there", ends=False)


def test_arguments_have_no_keys_but_those_that_a_schema_names(compilers, real):
    """Where it doesn't say otherwise: a model that may invent keys goes on until it is cut off."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {
        "type": "object", "properties": {"c": {"const": 1}}}}}
    for more, may in (({}, False), ({"additionalProperties": True}, True), ({"anyOf": [{}]}, True)):
        tool = Tool("f", "", parameters | more)
        constraint = compilers("real").compile(Structure(tools=(tool,), tool_choice="f"))()
        for token in real.tokenizer.encode('{"name": "f", "arguments": {"a": 1, "', special=False):
            assert torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[token])
            constraint.accept(token)
        (other,) = real.tokenizer.encode("z", special=False)
        assert bool(torch.isfinite(constraint.mask(torch.zeros(real.config.vocab_size))[other])) == may
    assert closed(parameters)["properties"]["b"]["additionalProperties"] is False
    assert "additionalProperties" not in parameters["properties"]["b"], "the given one is left as it is"


@pytest.mark.parametrize(("arguments", "word"), [
    ({}, "0 structures"), ({"json_object": True, "regex": "a"}, "2 structures"),
    ({"json_object": True, "tools": tuple(STRICT), "tool_choice": "required"}, "2 structures")])
def test_exactly_one_structure(arguments, word):
    with pytest.raises(UsageError, match=word):
        Structure(**arguments)


@pytest.mark.parametrize(("tools", "choice", "word"), [
    ((), "required", "none"), (tuple(STRICT), "other", "get_weather"),
    ((Tool("a"), Tool("a")), "required", "name of its own"),
    (tuple(Tool(f"t{number}") for number in range(200)), "required", "128"),
    ((Tool("f", "", {"not": {}}, strict=True),), "f", "not")])
def test_wrong_tools(compilers, tools, choice, word):
    with pytest.raises(UsageError, match=word):
        compilers("tiny").compile(Structure(tools=tools, tool_choice=choice))


def test_tools_that_are_not_strict_may_have_schemas_that_are_not_supported(write):
    for format in (TurnFormat("hermes"), TurnFormat("gemma", variant="function")):
        tool = Tool("f", "", {"type": "object", "not": {"required": ["x"]}, "properties": {"a": {"const": 1}},
                              "required": ["a"], "additionalProperties": False})
        text, reason = write("tiny", Structure(tools=(tool,), tool_choice="f"), format=format)
        parsed, _ = calls(format, text, [tool])
        assert reason == "stop" and [(name, json.loads(given)) for name, given in parsed] == [("f", {"a": 1})]


def test_without_the_library_there_is_a_command(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="pip install") as caught:
        Compiler(tiny.tokenizer, PLAIN, tiny.config.vocab_size)
    assert "pip install llguidance" in str(caught.value)
