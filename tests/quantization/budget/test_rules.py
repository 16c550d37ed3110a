"""Rules that say exactly what was chosen."""

from __future__ import annotations

import json
import random

import pytest

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config
from quantkit.models.synthetic import CONFIGS
from quantkit.quantization.budget.choose import part_of, rules_of
from quantkit.quantization.recipe import Candidate
from quantkit.testing import FAMILIES, tiny_model


def candidate(bits: int) -> Candidate:
    return Candidate(method="rtn", spec=QuantSpec(bits=bits, granularity=Granularity(strategy="channel")))


CANDIDATES = (*(candidate(bits) for bits in range(2, 9)), Candidate())


def decided(rules, name):
    rule = next(rule for rule in rules if rule.matches(name))
    return CANDIDATES.index(Candidate(**{key: getattr(rule, key) for key in Candidate.model_fields}))


def unit_of(slot):
    """Layers of equal value get the same."""
    return slot.name.partition(".experts.")[0] if ".experts." in slot.name else slot.shares


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("seed", range(4))
def test_every_layer_gets_its_own(family, seed, tmp_path):
    config = parse_config(json.loads((tiny_model(tmp_path / "m", family, num_hidden_layers=13,
                                                 **({"max_window_layers": 13} if "qwen" in family else {}))
                                      / "config.json").read_text()))
    chance, of_layer = random.Random(seed), {}
    chosen = {}
    for slot in linear_slots(config):
        index = chance.randrange(8) if chance.random() < 0.7 else 3
        chosen[slot.name] = of_layer.setdefault(unit_of(slot), index)
    rules = rules_of(chosen, CANDIDATES)
    assert {name: decided(rules, name) for name in chosen} == chosen
    assert not any(rule.matches(name) for rule in rules for name in (
        "model.layers.13.mlp.gate", "lm_head.x", "model.norm", "vision.layers.1.mlp.down_projx"))
    used = {next(i for i, rule in enumerate(rules) if rule.matches(name)) for name in chosen}
    assert used == set(range(len(rules))), "a rule that decides nothing is an error when a plan is made"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_large_model_needs_few_rules(name):
    chance, of = random.Random(0), {}
    chosen = {slot.name: of.setdefault(unit_of(slot), chance.randrange(8))
              for slot in linear_slots(parse_config(CONFIGS[name]))}
    rules = rules_of(chosen, CANDIDATES)
    assert len(rules) <= 8 * 8 and {name: decided(rules, name) for name in chosen} == chosen


def test_long_lists_of_layers_are_cut():
    chosen = {f"model.layers.{i}.mlp.down_proj": i % 2 for i in range(2001)}
    rules = rules_of(chosen, CANDIDATES)
    assert len(rules) > 3 and all(len(rule.match) < 512 for rule in rules)
    assert all(decided(rules, name) == index for name, index in chosen.items())


def test_they_can_be_read():
    chosen = {f"model.layers.{i}.{part}": 1 if i in (0, 3) else 2 for i in range(5)
              for part in ("self_attn.q_proj", "self_attn.k_proj")} | {"lm_head": 6}
    assert [rule.match for rule in rules_of(chosen, CANDIDATES)] == [
        r"re:model\.layers\.(0|3)\.(self_attn\.q_proj|self_attn\.k_proj)", "lm_head",
        "model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj"]


@pytest.mark.parametrize("name, part", [
    ("model.layers.12.self_attn.q_proj", "self_attn.q_proj"), ("lm_head", "lm_head"),
    ("model.layers.1.mlp.experts.17.up_proj", "mlp.experts.*.up_proj")])
def test_part(name, part):
    assert part_of(name) == part
