"""Patterns of strangers: those that tools write are read, those that may never end are refused."""

import re
import time

import pytest
import torch

from quantkit.checkpoint.foreign.compressed_tensors import layers
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import QuantkitError

NAME = "model.layers.10.mlp.experts.100.down_proj".ljust(64, "y")


def read(text: str) -> re.Pattern[str]:
    return ConfigReader({"targets": [text]}, "config.json").pattern("targets", text)


@pytest.mark.parametrize(("text", "name"), [
    (r".*self_attn.*", "model.layers.3.self_attn.q_proj"), (r"^lm_head$", "lm_head"),
    (r".*\.(q|k|v)_proj$", "model.layers.3.self_attn.k_proj"),
    (r"model\.layers\.[0-9]+\.mlp\..*", "model.layers.31.mlp.down_proj"),
    (r".*experts\.\d+\.(gate|up)_proj", "model.layers.1.mlp.experts.7.up_proj"),
    (r"model\.layers\.(?:1|2)\..*", "model.layers.2.mlp.up_proj"),
    (r".*[*+]{0}mlp.*", "model.mlp"), (r"a{2}\)\*", "aa)*"),
    (r"model\.layers\.(0|1|2)\..*", "model.layers.1.mlp.up_proj"), (r".*q_proj.*", "model.q_proj"),
    (r".*\.(gate|up)_proj.*", "model.layers.1.mlp.up_proj"), (r"(?i).*MLP", "model.mlp"),
    (r"^model\.layers\.[0-9]\..*", "model.layers.7.mlp.up_proj"), (r"^(?!.*lm_head).*$", "model.mlp"),
    (r".*layers.*mlp.*experts.*down_proj", "model.layers.1.mlp.experts.0.down_proj"),
    (r".*layers\.\d+\..*experts\.\d+\.(gate|up|down)_proj.*", "model.layers.1.mlp.experts.7.up_proj"),
    (r"(model\.)?layers\.(" + "|".join(map(str, range(120))) + r")\.mlp\..*", "layers.119.mlp.up_proj")])
def test_what_tools_write(text: str, name: str) -> None:
    assert read(text).match(name)


@pytest.mark.parametrize(("text", "said"), [
    (r"(a+)+$", "repeats so much"), (r"(.*)*x", "repeats so much"), (r"(a|a){2,9}b", "repeats so much"),
    (r".*.*.*.*.*x", "repeats so much"), (".?" * 100 + "Z", "so many choices"),
    ("(?:.|.)" * 22 + "Z", "so many choices"), (r".{0,63}" * 4 + "Z", "so many choices"),
    ("(?=.*.*.*Z)" * 2, "so many choices"), ("(((.*.*)?.*)?.*)?.*x", "so many choices"),
    (r"(a)?(?(1)a|b)", "isn't read"), (r"(?#a)a", "isn't read"), (r"(?x)a", "isn't read"),
    (r"a{,}" * 5 + "b", "so many choices"), ("[^]*]*" * 5 + "b", "so many choices"),
    (r"(a)\1", "isn't read"), (r"(?P<n>a)(?P=n)", "isn't read"),
    ("a" * 1001, "isn't read"), (r"(", "no regular expression"), (r"[", "no regular expression"),
    (r"a{99999999999999999999}", "no regular expression")])
def test_what_may_never_end(text: str, said: str) -> None:
    with pytest.raises(QuantkitError, match=said):
        read(text)


@pytest.mark.parametrize("text", [
    ".*.*.*.*Z", ".*?.*?.*?.*?Z", "(.*)(.*)(.*)(.*)Z", "(?:.|.)" * 19 + "Z", ".?" * 20 + "Z",
    ".{0,31}" * 4 + "Z", "(?=.*Z|.*).*.*Z", "(.?(.?.*)?.*)?.*Z", "(?:.*|.*)(?:.*|.*)(?:.*|.*)Z"])
@pytest.mark.parametrize("name", [NAME, "y" * 64])
def test_what_is_read_is_soon_done(text: str, name: str) -> None:
    pattern, start = read(text), time.process_time()
    assert not pattern.match(name) and time.process_time() - start < 1


def test_thousands_of_names_are_soon_found() -> None:
    """A mix names every layer, and each layer is looked up."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(60)
             for expert in range(100)]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    config = {"format": "pack-quantized", "config_groups": {
        f"group_{start}": {"targets": [f"re:^{re.escape(name)}$" for name in names[start::2]],
                           "weights": {**weights, "num_bits": 4 + 4 * start}} for start in (0, 1)}}
    infos = {f"{name}.{suffix}": TensorInfo(suffix, (1,), torch.bfloat16) for name in names
             for suffix in ("weight_packed", "weight_scale", "weight_shape")}
    layer = layers(ConfigReader(config, "config.json"), infos, "bfloat16")
    found = [layer(LinearSlot(name, 8, 8, 0, name)) for name in names]
    assert [one.spec.bits for one in found if one] == [4, 8] * 3000
