"""An option's name means one thing in all commands, and one thing has one name."""

from __future__ import annotations

import re
from collections import defaultdict

import click
import pytest

from quantkit.cli.options import LLAMA_CPP, LOADERS, TokenCount, TokenCounts
from tests.helpers.options import OPTIONS, long_name

MEANINGS = {
    "--window": r"^Tokens in a\b.*window",
    "--windows": r"^Number of\b.*windows",
    "--context": r"^Tokens (of each sequence|of a context|in the cache)",
    "--max-tokens": r"new tokens\b",
    "--prompt-tokens": r"prompt tokens\b(?!.*(speed|timed))|go through the cache as a prompt",
    "--prefill": r"^Prompt tokens of the (speed|timed)",
    "--kv": r"^(Consider only these )?KV settings?\b",
    "--recipe": r"\b(recipes? first|only these recipes|recipe's name)\b",
    "--device": r"^Device\b",
    "--revision": r"^Branch, tag or commit",
    "--fresh": r"^(With --out, m|M)easure anew",
    "--seed": r"^Seed\b",
    "--temperature": r"most likely token \(greedy\)",
}
"""What an option's help says → what it is called."""
SAME_DEFAULT = ("--device", "--dtype", "--temperature", "--draft")


def kind(option: click.Option) -> str:
    """What a value is, or the values of a list are."""
    if isinstance(option.type, TokenCount | TokenCounts):
        return "tokens"
    if isinstance(option.type, click.Choice):
        return f"one of {sorted(option.type.choices)}"
    return {click.types.IntParamType: "whole number", click.types.FloatParamType: "number",
            click.Path: "path"}.get(next((base for base in type(option.type).__mro__ if base in (
                click.types.IntParamType, click.types.FloatParamType, click.Path)), None),
                                    option.type.name)


def test_an_option_has_the_same_spelling_and_kind_of_value_everywhere():
    seen = defaultdict(lambda: defaultdict(list))
    for path, option in OPTIONS:
        seen[long_name(option)][tuple(sorted(option.opts)), kind(option)].append(path)
    engines = seen.pop("--for")
    assert {name: dict(kinds) for name, kinds in seen.items() if len(kinds) > 1} == {}
    # two engines more can be planned for: they have no rules of loading
    assert {kind: paths for (_, kind), paths in engines.items()} == {
        f"one of {sorted(LOADERS)}": ["export", "verify"],
        f"one of {sorted(['quantkit', LLAMA_CPP, *LOADERS])}": ["quantize"]}
    assert len(seen) > 60 and len(seen["--kv"]) == 1


def test_a_short_option_stands_for_one_long_one():
    longs = defaultdict(set)
    for _, option in OPTIONS:
        for short in set(option.opts) - {long_name(option)}:
            longs[short].add(long_name(option))
    assert {short: names for short, names in longs.items() if len(names) > 1} == {}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_meaning_has_one_name(name):
    meant = {(path, long_name(option)) for path, option in OPTIONS
             if re.search(MEANINGS[name], option.help or "", re.IGNORECASE)}
    assert {called for _, called in meant} == {name}, meant
    called = {path for path, option in OPTIONS if long_name(option) == name}
    assert called == {path for path, _ in meant} and len(called) > 1, "the help of each says what it means"


@pytest.mark.parametrize("name", SAME_DEFAULT)
def test_a_default_is_the_same_everywhere(name):
    defaults = {path: option.default for path, option in OPTIONS if long_name(option) == name
                and not option.multiple}
    assert len(set(defaults.values())) == 1 < len(defaults), defaults


def test_what_may_be_repeated_may_also_be_a_list():
    """KV settings, recipes: one rule for all commands."""
    for path, option in OPTIONS:
        if long_name(option) == "--kv":
            assert option.multiple and option.metavar == "LIST", path
