"""Rotations that depend on how long a sequence gets: on its own length, and on nobody else's."""

from __future__ import annotations

import warnings

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.architecture import parse_config
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing import tiny_weights

TRAINED = 24
FACTORS = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 1.5 * i for i in range(8)]}
KEYS = {"original_max_position_embeddings": TRAINED, "rope_scaling": {"type": "longrope", **FACTORS}}


def ids(batch, length, seed=0):
    return torch.randint(0, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def config(make_config):
    return make_config("phi3", **KEYS)


def through_cache(model, tokens, max_lengths):
    """Rows one beside the other, cut in pieces, each announced to get as long as ``max_lengths`` says."""
    cache = KVCache(model.config, None, model.dtype)
    rows, found = [cache.add(max_length) for max_length in max_lengths], []
    for some in tokens.split([7, 1, tokens.shape[1] - 8], 1):
        found.append(model(some, cache=Batch(cache, rows)))
    return torch.cat(found, 1)


@pytest.mark.oracle
@pytest.mark.parametrize("length", [TRAINED, TRAINED + 1, 60])
def test_transformers_changes_its_rotation_at_the_same_length(config, make_model, length):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = {key: value for key, value in config.items() if key != "torch_dtype"}
        hf = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**keys), attn_implementation="eager",
            dtype=torch.float32).eval()
    hf.load_state_dict(tiny_weights(config), strict=False)
    ours, tokens = make_model(config), ids(2, length)
    expected = hf(tokens).logits
    assert (ours(tokens) - expected).abs().max() <= 1e-4
    assert (through_cache(ours, tokens, [length] * 2) - expected).abs().max() <= 1e-4


def test_the_choice_is_each_sequences_own(config, make_model):
    model, tokens = make_model(config), ids(2, 20)
    short, long = (through_cache(model, tokens, [max_length] * 2) for max_length in (TRAINED, TRAINED + 1))
    assert (short - long).abs().max() > 0.05
    mixed = through_cache(model, tokens, [TRAINED + 1, TRAINED])
    assert torch.equal(mixed[0], long[0]) and torch.equal(mixed[1], short[1])
    assert torch.equal(through_cache(model, tokens, [0, 0]), short)


def test_a_copy_keeps_it(config, make_model):
    model = make_model(config)
    cache = KVCache(model.config, None, model.dtype)
    row = cache.add(60)
    model(ids(1, 5), cache=Batch(cache, [row]))
    copies = [cache.fork(row), cache.fork(cache.fork(row))]
    first, *others = (model(ids(1, 3, seed=1), cache=Batch(cache, [one])) for one in (row, *copies))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("keys", "named"), [
    ({"rope_scaling": {"type": "longrope", **FACTORS, "long_factor": [1.0] * 7}}, "long_factor"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
    ({"rope_scaling": {"type": "longrope", **FACTORS, "short_factor": [0.0] * 8}}, "short_factor"),
    ({"rope_scaling": {"type": "longrope", **FACTORS, "short_mscale": 1.2}}, "short_mscale"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"type": "longrope", **FACTORS, "original_max_position_embeddings": 99}},
     "original_max_position_embeddings"),
    ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "longrope", **FACTORS}}, "factor"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.5, "rope_parameters": {
        "rope_type": "default", "partial_rotary_factor": 0.75}}, "partial_rotary_factor"),
])
def test_what_does_not_fit_is_named(make_config, keys, named):
    with pytest.raises(UnsupportedModelError, match=named):
        parse_config(make_config("phi3", original_max_position_embeddings=TRAINED, **keys))


def test_its_first_name_and_its_scale(make_config):
    rope = parse_config(make_config("phi3", original_max_position_embeddings=64,
                                    rope_scaling={"type": "su", **FACTORS})).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("longrope", 8.0, 64)
    assert rope.attention_factor == pytest.approx(1.5 ** 0.5)
    assert rope.long_factors == tuple(FACTORS["long_factor"])
