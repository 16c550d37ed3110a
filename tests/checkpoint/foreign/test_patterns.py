"""Patterns of strangers: those that tools write are read, those that may never end are refused."""

import re

import pytest

from quantkit.checkpoint.foreign.patterns import compiled
from quantkit.errors import QuantkitError
from quantkit.models.reader import ConfigReader


def read(text: str) -> re.Pattern[str]:
    return compiled(ConfigReader({"targets": [text]}, "config.json"), "targets", text)


@pytest.mark.parametrize(("text", "name"), [
    (r".*self_attn.*", "model.layers.3.self_attn.q_proj"), (r"^lm_head$", "lm_head"),
    (r".*\.(q|k|v)_proj$", "model.layers.3.self_attn.k_proj"),
    (r"model\.layers\.[0-9]+\.mlp\..*", "model.layers.31.mlp.down_proj"),
    (r".*experts\.\d+\.(gate|up)_proj", "model.layers.1.mlp.experts.7.up_proj"),
    (r"model\.layers\.(?:1|2)\..*", "model.layers.2.mlp.up_proj"),
    (r".*[*+]{0}mlp.*", "model.mlp"), (r"a{2}\)\*", "aa)*")])
def test_what_tools_write(text: str, name: str) -> None:
    assert read(text).match(name)


@pytest.mark.parametrize(("text", "said"), [
    (r"(a+)+$", "repeats so much"), (r"(.*)*x", "repeats so much"), (r"(a|a){2,9}b", "repeats so much"),
    (r".*.*.*.*.*x", "repeats so much"), (r"(a)\1", "isn't read"), (r"(?P<n>a)(?P=n)", "isn't read"),
    ("a" * 1001, "isn't read"), (r"(", "no regular expression"), (r"[", "no regular expression"),
    (r"a{99999999999999999999}", "no regular expression")])
def test_what_may_never_end(text: str, said: str) -> None:
    with pytest.raises(QuantkitError, match=said):
        read(text)
