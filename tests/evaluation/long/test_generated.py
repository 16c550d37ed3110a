"""By generated length: teacher forcing on the full cache's text, and where free generation would part."""

import pytest
import torch

from quantkit.evaluation.long.generated import by_step, steps_of
from quantkit.evaluation.metrics import KL
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling

TOKENS = 40


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(4, 300, (3, 150), generator=torch.Generator().manual_seed(4))


def test_where_it_differs_is_where_free_generation_does(exact, prompts):
    kvs = [parse_kv(kv) for kv in ("none", "int4", "snapkv(0.3, window=8)", "window(40)",
                                   "tova(50, interval=7)")]
    drifts = by_step(exact, kvs, prompts, TOKENS)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    ids = [[one.token_ids for one in generate(exact, prompts.tolist(), sampling, kv=kv)] for kv in kvs]
    for kv, drift, texts in zip(kvs, drifts, ids):
        parts = [next((at for at, (a, b) in enumerate(zip(full, own)) if a != b), None)
                 for full, own in zip(ids[0], texts)]
        assert list(drift.differs) == parts, str(kv)
        assert drift.decode_tok_s > 0
    assert drifts[0].differs == (None, None, None)
    assert any(one is not None for drift in drifts[2:] for one in drift.differs), "or this says nothing"


def test_buckets_are_means_over_steps_that_read_one_token_each(exact, prompts):
    spec = parse_kv("snapkv(0.3, window=8)")
    _, drift = by_step(exact, [parse_kv("none"), spec], prompts[:1], TOKENS)
    rows = {}
    (full,) = generate(exact, prompts[:1].tolist(), Sampling(max_tokens=TOKENS, ignore_eos=True),
                       kv=parse_kv("none"))
    for kv in (parse_kv("none"), spec):
        cache = KVCache(exact.config, kv, exact.dtype)
        row = cache.add()
        rows[str(kv)] = [exact.model(prompts[:1], cache=Batch(cache, [row], "prefill_end"))[0, -1]]
        for token in full.token_ids[:-1]:
            logits = exact.model(torch.tensor([[token]]), cache=Batch(cache, [row], "decode"))
            rows[str(kv)].append(logits[0, 0])
    reference, own = (torch.stack(found).float().log_softmax(-1) for found in rows.values())
    kl = KL.score(reference, own, torch.tensor(full.token_ids))
    for bucket, (low, high) in zip(drift.buckets, ((0, 16), (16, TOKENS)), strict=True):
        assert (bucket.low, bucket.high) == (low, high)
        assert bucket.values["kl_mean"].value == pytest.approx(float(kl[low:high].mean()), rel=1e-2, abs=1e-4)
    noise = 1e-5 if exact.dtype == torch.float32 else 2e-3  # of prompts read operation by operation
    assert kl[0] == pytest.approx(0, abs=noise), "the policy acts behind the prompt's last token"


def test_steps():
    assert steps_of(10) == [0, 10] and steps_of(16) == [0, 16] and steps_of(128) == [0, 16, 64, 128]
