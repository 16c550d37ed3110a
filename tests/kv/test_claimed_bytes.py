"""The cache holds what its description claims: codes, scales, positions, and pages that stay plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from quantkit.kv.codecs.kivi import GROUP
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.models.architecture import parse_config
from quantkit.runtime.memory.kv import footprint

HALF = 16
PAGE = 64
POSITION = 32
"""Bits of a number of the full cache, tokens of a page, bits of a slot's position where a policy drops."""
DIM = 64
"""Of SmolLM2's heads."""
CODECS = ("none", "int8", "fp8", "int4", "int3", "int2", "rotation(4)", "rotation(2.5)", "int8/int4")
POLICIES = ("snapkv(0.5)", "pyramidkv(0.5)", "adakv(0.5)", "expected(0.5)", "kvzip(0.5)", "tova(0.5)",
            "window(1024, sinks=4)", "snapkv(2000)", "snapkv(0.5)+int8", "kvzip(0.5)+int8")


def bits(codec: str, options: Mapping[str, Any]) -> tuple[float, float]:
    """Of a number of keys and of values, by the codec's description: codes, scales, and what is shared."""
    if codec in ("int8", "fp8"):
        return 8 + 16 / DIM, 8 + 16 / DIM
    if codec == "rotation":
        width = options.get("bits", 4)
        return int(width + 0.5) + 16 / DIM + 16 / PAGE, int(width) + 16 / DIM
    if codec.startswith("int"):
        width = int(codec.removeprefix("int"))
        return width + 32 / GROUP, width + 32 / GROUP
    return HALF, HALF


def claimed(spec: KVSpec, tokens: int) -> float:
    """Bytes over those of a full cache of so many tokens, from documented numbers alone."""
    budget = spec.options.get("budget")
    kept = float(tokens)
    more = 0.0
    if budget is not None:
        sinks = int(spec.options.get("sinks", 4)) if spec.policy == "window" else 0
        kept = min(kept, budget * tokens if budget < 1 else budget + sinks)
        more = POSITION / (2 * DIM)
    keys, _ = bits(spec.codec, spec.codec_options)
    _, values = bits(spec.values or spec.codec, spec.value_options if spec.values else spec.codec_options)
    width, plain = (keys + values) / 2, 0.0
    if min(keys, values) < 8:  # the first page, and the newest tokens up to where a page begins
        plain = min(kept, PAGE + kept - max(0, kept - PAGE) // PAGE * PAGE)
    return (plain * HALF + (kept - plain) * width + kept * more) / (tokens * HALF)


@pytest.fixture(scope="module")
def config():
    """Heads and layers of SmolLM2-135M."""
    return parse_config({"model_type": "llama", "vocab_size": 320, "hidden_size": 576, "head_dim": 64,
                         "intermediate_size": 64, "num_hidden_layers": 30, "num_attention_heads": 9,
                         "num_key_value_heads": 3, "max_position_embeddings": 1 << 16})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [8000, 32_000])
@pytest.mark.parametrize("kv", [*CODECS, *POLICIES])
def test_what_is_held_at_a_prompts_end_is_what_is_claimed(config, kv, tokens):
    """Pages of which only a part is filled are what is more: less than 3% from 8,000 tokens on, but of a
    window, which isn't longer for that, up to one page of each head."""
    found, full = (footprint(config, parse_kv(one), torch.bfloat16, tokens, tokens, 512).sequence_bytes
                   for one in (kv, "none"))
    claim, spare = claimed(parse_kv(kv), tokens), 63 / 1028 if kv.startswith("window") else 0.03
    assert claim * 0.999 <= found / full <= claim * (1 + spare), (claim, found / full)
