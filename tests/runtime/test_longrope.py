"""A request's rotation follows from its prompt and its limit, whatever runs beside it."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.architecture import parse_config
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.program_model import rope_tables
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model

TRAINED = 24
FACTORS = {"short_factor": [1 + 0.2 * i for i in range(8)], "long_factor": [4 + 3.0 * i for i in range(8)]}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("long") / "model", "phi3", dtype="float32",
                               original_max_position_embeddings=TRAINED,
                               rope_scaling={"type": "longrope", **FACTORS})))


def greedy(loaded, prompt, tokens, max_length):
    """What a sequence that is announced to get so long goes on with, from one forward pass over all of it."""
    cache = KVCache(loaded.config, None, loaded.dtype)
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt + tokens[:-1]]),
                              cache=Batch(cache, [cache.add(max_length)]))
    return logits[0, len(prompt) - 1:].argmax(-1).tolist()


@pytest.mark.parametrize(("length", "limit"), [(10, 14), (10, 15), (20, 10), (40, 5)])
def test_what_is_announced_is_what_decides(loaded, length, limit):
    prompt = torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = Sampling(max_tokens=limit, temperature=0.0, ignore_eos=True)
    tokens = generate(loaded, [prompt], sampling)[0].token_ids
    assert tokens == greedy(loaded, prompt, tokens, length + limit)
    others = [[5, 6, 7], [*range(10, 60)]]
    assert generate(loaded, [others[0], prompt, others[1]], sampling)[1].token_ids == tokens


# -- what a program is told of positions

@pytest.mark.parametrize("dim", [64, 36])
def test_a_positions_angles_do_not_depend_on_how_many_are_worked_out(dim):
    """A request beside a longer one reads the same."""
    config = parse_config({"model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": dim})
    (longest,) = rope_tables(config, 5000)
    for size in (1, 511, 512, 1024, 2500):
        for few, many in zip(next(iter(rope_tables(config, size))), longest):
            assert few.shape == (size, dim // 2) and torch.equal(few, many[:size])
