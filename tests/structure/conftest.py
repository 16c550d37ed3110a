"""Turns as their parsers see them, and models with and without sense."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.runtime.loader import LoadedModel, load
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta
from quantkit.structure.grammar import Compiler
from quantkit.structure.turns import Tool, TurnFormat, parser
from quantkit.testing import tiny_model

PLAIN = TurnFormat("json")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> LoadedModel:
    """A model of random weights: whatever sense its text has comes from a constraint."""
    return load(str(tiny_model(tmp_path_factory.mktemp("structure") / "tiny", "qwen3", dtype="float32")))


@pytest.fixture(scope="session")
def real(smollm2) -> LoadedModel:
    """A real small model."""
    return load(smollm2)


WEATHER = Tool("get_weather", "Weather of a city.", {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"]})
TIME = Tool("time", "The time.", {"type": "object", "properties": {}})


@pytest.fixture(scope="session")
def tools() -> list[Tool]:
    """Two tools, one without arguments."""
    return [WEATHER, TIME]


class Turn:
    """What a parser made of a text."""

    def __init__(self, deltas):
        self.parts, self.calls, ids = [], [], []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if delta.name is not None:
                    assert delta.index == len(self.calls) and delta.id
                    ids.append(delta.id)
                    self.calls.append([delta.name, ""])
                    self.parts.append(("call", delta.index))
                else:
                    assert delta.id is None and delta.arguments
                assert delta.index == len(self.calls) - 1  # a call that ended never goes on
                self.calls[-1][1] += delta.arguments
                continue
            assert delta.text
            kind = {TextDelta: "text", ReasoningDelta: "reasoning"}[type(delta)]
            if self.parts and self.parts[-1][0] == kind:
                self.parts[-1] = (kind, self.parts[-1][1] + delta.text)
            else:
                self.parts.append((kind, delta.text))
        assert len(set(ids)) == len(ids)

    @property
    def text(self):
        return "".join(text for kind, text in self.parts if kind == "text")

    @property
    def reasoning(self):
        return "".join(text for kind, text in self.parts if kind == "reasoning")

    @property
    def parsed(self):
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    def __eq__(self, other):
        return (self.parts, self.calls) == (other.parts, other.calls)

    def __repr__(self):
        return f"{self.parts} {self.calls}"


@pytest.fixture(scope="session")
def read(tools):
    """``read("hermes", text, cuts=[3, 7])``: what a parser makes of a text that comes in pieces."""
    def read(name, text, cuts=(), *, reasoning=None, opened=False, variant="", given=tools, bare=False):
        turn = parser(TurnFormat(name, reasoning, variant=variant), given, opened, bare)
        deltas, begin = [], 0
        for end in (*sorted(cuts), len(text)):
            deltas += turn.push(text[begin:end])
            begin = max(begin, end)
        return Turn(deltas + turn.finish())

    return read


@pytest.fixture(scope="session")
def compilers(tiny, real):
    """Compilers by model and format, made once."""
    made = {}

    def compiler(model, format=PLAIN):
        if (key := (model, format)) not in made:
            loaded = {"tiny": tiny, "real": real}[model]
            made[key] = Compiler(loaded.tokenizer, format, loaded.config.vocab_size)
        return made[key]

    return compiler
