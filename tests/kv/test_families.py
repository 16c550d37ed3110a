"""Windows, caps and ropes of the families that differ from Llama, through every codec and policy."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.testing import FAMILIES, VOCAB, tiny_weights

BASE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True}
CASES = {"gemma2": {"sliding_window": 9, "head_dim": 32, "query_pre_attn_scalar": 20},
         "gemma3_text": {"sliding_window": 9, "head_dim": 32},
         "gpt_oss": {"sliding_window": 9, "head_dim": 32},
         "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 9, "head_dim": 32},
         "mixtral": {"sliding_window": 9, "head_dim": 32}, "qwen3_moe": {}}
IDS = torch.randint(0, VOCAB, (1, 80), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CASES, scope="module")
def model(request):
    config = {**BASE, "model_type": request.param, **FAMILIES[request.param], **CASES[request.param]}
    weights = tiny_weights(config)
    return CausalLM(parse_config(config), Weights(weights.__getitem__, weights.__contains__, torch.float32))


@torch.no_grad()
def through(model, kv, cuts):
    """Logits of IDS, cut at these places; what is behind the first is decoding."""
    cache = KVCache(model.config, parse_kv(kv), model.dtype)
    row, found = cache.add(), []
    for start, stop in zip([0, *cuts], [*cuts, 80]):
        phase = "decode" if start else "prefill_end"
        found.append(model(IDS[:, start:stop], cache=Batch(cache, [row], phase)))
    return torch.cat(found, 1)[0]


def divergence(model, kv, cuts):
    with torch.no_grad():
        exact = model(IDS)[0].log_softmax(-1)
    got = through(model, kv, cuts).log_softmax(-1)
    return float((exact.exp() * (exact - got)).sum(-1).mean())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cuts", [[], [17, 18, 19, 50], [*range(1, 80)]], ids=["whole", "pieces", "tokens"])
def test_codecs_cost_what_their_bits_say(model, cuts):
    cost = [divergence(model, kv, cuts) for kv in ("none", "int8", "int2(residual_length=0, sinks=0)")]
    assert abs(cost[0]) < 1e-6 < cost[1] < 0.02 and 5 * cost[1] < cost[2] < 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["window(80)", "window(8, sinks=1)+int8", "snapkv(200)",
                                "snapkv(20, window=4)", "tova(200)", "tova(20, interval=2)+int8"])
def test_policies_cost_nothing_before_they_drop(model, kv):
    cost = divergence(model, kv, [40, 41, *range(42, 80, 2)])
    # a query that sees nine positions gives no weight to others, and those that it does see are kept
    free = kv in ("window(80)", "snapkv(200)", "tova(200)") or (
        kv == "snapkv(20, window=4)" and set(model.config.sliding_windows) == {9})
    assert abs(cost) < 1e-6 if free else 1e-6 < cost < 3


@torch.no_grad()
def test_layers_with_a_window_forget_what_is_behind_it(model):
    """What stands before a window reaches a query through the layers without one only."""
    windows = model.config.sliding_windows
    changed = IDS.clone()
    changed[0, 0] = (changed[0, 0] + 1) % VOCAB
    apart = (model(changed) - model(IDS)).abs().amax((0, 2))
    if windows == (9, 9):
        assert apart[:17].amax() > 1e-3 and not apart[17:].any()
    else:
        assert apart[40:].amax() > 1e-6
