"""Every family's tokenizer under a constraint: tokens drawn at random from what is allowed make sense."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
import torch

from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.structure.grammar import Compiler, Structure
from quantkit.structure.turns import MISTRAL_THINK, THINK, Tool, TurnFormat, parser, turn_format
from quantkit.text.tokenizer import Tokenizer
from tests.structure.templates import FAMILIES, MISTRAL
from tests.text.families import FAMILIES as TOKENIZERS
from tests.text.families import files_of, tokenizer_of

SCHEMA = {"type": "object", "properties": {
    "city": {"enum": ["Paris", 'a"b', "日本"]}, "n": {"enum": [1, 2.5, None]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    "required": ["city", "n"], "additionalProperties": False}
TOOLS = [Tool("get_weather", "", SCHEMA, strict=True),
         Tool("time", "", {"properties": {}, "additionalProperties": False}, strict=True)]


def tokenizer_with(family, template):
    files = files_of(family)
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
    return Tokenizer(files | {"tokenizer_config.json": json.dumps(settings).encode()}, {})


def drawn(tokenizer, structure, format, seed, limit=600, end=0.0):
    """Random tokens under a structure, and the text that is made of them; ``None`` if they don't end."""
    size = tokenizer.vocab_size + 50
    constraint = Compiler(tokenizer, format, size).compile(structure)()
    stream, chance, text = tokenizer.stream(format.special), random.Random(seed), ""
    for _ in range(limit):
        if constraint.ended:
            return text + stream.finish()
        allowed = torch.isfinite(constraint.mask(torch.zeros(size))).nonzero().flatten().tolist()
        assert allowed and max(allowed) < size - 50
        ends = tokenizer.eos_ids & set(allowed)
        if ends and chance.random() < 0.5:
            return text + stream.finish()
        token = chance.choice([token for token in allowed if token not in tokenizer.eos_ids] or allowed)
        constraint.accept(token)
        text += stream.push(token)
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_regular_expression_with_every_tokenizer(name):
    tokenizer = tokenizer_of(name)
    assert tokenizer.eos_ids
    for seed in range(4):
        text = drawn(tokenizer, Structure(regex="x[a-c é日]{6}y"), TurnFormat("json"), seed)
        assert re.fullmatch("x[a-c é日]{6}y", text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_calls_with_the_familys_own_tokens(name, choice):
    tokenizer = tokenizer_with(*FAMILIES[name])
    format, complete = turn_format(tokenizer), 0
    for seed in range(6):
        text = drawn(tokenizer, Structure(tools=tuple(TOOLS), tool_choice=choice), format, seed)
        if text is None:
            continue
        turn, calls = parser(format, TOOLS), []
        deltas = turn.push(text) + turn.finish()
        assert not any(hasattr(delta, "text") for delta in deltas), text
        for delta in deltas:
            if delta.name:
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
        for called, arguments in calls:
            assert choice in ("required", called)
            jsonschema.validate(json.loads(arguments), next(t.parameters for t in TOOLS if t.name == called))
        complete += 1
    assert complete >= 3


@pytest.mark.parametrize(("family", "template", "marks"), [
    (*FAMILIES["hermes"], THINK), ("mistral", MISTRAL + "{# [THINK] #}", MISTRAL_THINK)])
def test_reasoning_with_the_familys_own_tokens(family, template, marks):
    files = files_of(family)
    if family == "mistral":
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner
        inner = Inner.from_str(files["tokenizer.json"].decode())
        inner.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        files["tokenizer.json"] = inner.to_str().encode()
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
    tokenizer = Tokenizer(files | {"tokenizer_config.json": json.dumps(settings).encode()}, {})
    format = turn_format(tokenizer)
    assert format.reasoning == marks and (len(format.special) == 3) == (family == "mistral")
    constraint = Compiler(tokenizer, format, tokenizer.vocab_size).compile(
        Structure(regex="[0-9]{3}", reasoning=True))()
    stream, text = tokenizer.stream(format.special), ""
    for token in tokenizer.encode(f"{marks[0]}a <b 77{marks[1]}123", special=False):
        if tokenizer.decode([token]).strip() or token in format.special:  # not a space before the first word
            constraint.accept(token)
            text += stream.push(token)
    assert constraint.ended
    turn = parser(format, [])
    deltas = turn.push(text + stream.finish()) + turn.finish()
    assert [type(delta).__name__ for delta in deltas] == ["ReasoningDelta", "TextDelta"]
    assert deltas[1].text == "123"


def test_constraints_on_the_engines_own_thread(tiny):
    compiler = Compiler(tiny.tokenizer, TurnFormat("json"), tiny.config.vocab_size)
    engine, done = Engine(tiny), []
    engine.start()
    make = compiler.compile(Structure(regex="[a-f]{8}"))
    requests = [engine.submit([5, number], Sampling(max_tokens=20), constraint=make(), on_done=done.append)
                for number in range(5, 8)]
    assert engine.drain(60)
    engine.close()
    assert len(done) == 3
    for request in requests:
        assert re.fullmatch("[a-f]{8}", request.result.text) and request.result.finish_reason == "stop"


def test_logprobs_are_the_models_own(tiny):
    compiler = Compiler(tiny.tokenizer, TurnFormat("json"), tiny.config.vocab_size)
    heard = {}
    for name, constraint in (("free", None), ("bound", compiler.compile(Structure(regex="[0-9]"))())):
        engine, infos = Engine(tiny), []
        engine.submit([5, 9], Sampling(max_tokens=1), logprobs=5, constraint=constraint,
                      on_token=infos.append)
        while engine.step():
            pass
        heard[name] = infos[0]
    assert heard["free"].top == heard["bound"].top and heard["free"].id == heard["free"].top[0][0]
    assert heard["bound"].id != heard["free"].id and heard["bound"].logprob <= heard["free"].logprob
