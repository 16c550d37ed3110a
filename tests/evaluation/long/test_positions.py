"""By position and by generated length: sums of ordinary scoring cut into buckets, and where texts part."""

import math

import pytest
import torch

from quantkit.evaluation.long.generated import drifts_of, follow_text, steps_of
from quantkit.evaluation.long.positions import buckets_of, edges_of, score_window
from quantkit.evaluation.metrics import KL
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.score import compare
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError

TOKENS = 40


def random_ids(count, length, seed):
    return torch.randint(4, 300, (count, length), generator=torch.Generator().manual_seed(seed))


def drifts(model, kvs, prompts):
    texts = [follow_text(model, kvs, prompt, TOKENS) for prompt in prompts.tolist()]
    return drifts_of(list(map(str, kvs)), TOKENS, texts)


def test_buckets_together_are_the_ordinary_score(exact):
    kvs = [parse_kv(kv) for kv in ("none", "int4", "snapkv(0.5, window=8)", "tova(90, interval=7)")]
    windows, edges = random_ids(2, 700, seed=1), edges_of(100, [256, 700, 300])
    sums = [score_window(exact, kvs, window, 100, edges) for window in windows.tolist()]
    whole = compare([TeacherForcedModel(exact, kv, 100) for kv in kvs], windows, prompt=100)
    for index, (kv, scores) in enumerate(zip(kvs, whole)):
        buckets = buckets_of(str(kv), edges, [window.means[index] for window in sums])
        assert [(bucket.low, bucket.high) for bucket in buckets] == [(100, 256), (256, 300), (300, 699)]
        for name, of in (("perplexity", math.log), ("kl_mean", float), ("top1", float)):
            # the first prediction comes out of the last prompt token in neither
            total = sum(of(bucket.values[name].value) * (bucket.high - bucket.low) for bucket in buckets)
            assert total / 599 == pytest.approx(of(scores[name].value), rel=2e-3, abs=2e-5), (kv, name)
        assert sums[-1].kv_bytes[index] > 0


def test_the_full_cache_doesn_t_differ_from_itself_and_a_bucket_is_its_own_positions(exact):
    window, edges = random_ids(2, 700, seed=1)[:1], [100, 300, 699]
    sums = score_window(exact, [parse_kv("none"), parse_kv("int4")], window[0].tolist(), 100, edges)
    buckets = buckets_of("none", edges, [sums.means[0]])
    for bucket in buckets:
        assert bucket.values["kl_mean"].value == 0 and bucket.values["top1"].value == 1
    logits = exact.model(window)[0].float().log_softmax(-1)
    nll = -logits[:-1].gather(-1, window[0, 1:, None])[:, 0]
    loss = math.log(buckets[1].values["perplexity"].value)
    assert loss == pytest.approx(float(nll[300:699].mean()), rel=1e-3)


def test_edges_lie_behind_the_prompt():
    assert edges_of(512, [4096, 1024, 512, 2048]) == [512, 1024, 2048, 4095]
    with pytest.raises(UsageError, match="nothing to score"):
        edges_of(512, [512, 100])


def test_generated_texts_differ_where_free_generation_does(exact):
    kvs, prompts = [parse_kv(kv) for kv in ("none", "int4", "snapkv(0.3, window=8)", "window(40)",
                                            "tova(50, interval=7)")], random_ids(3, 150, seed=4)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    ids = [[text.token_ids for text in generate(exact, prompts.tolist(), sampling, kv=kv)] for kv in kvs]
    results = drifts(exact, kvs, prompts)
    for kv, drift, texts in zip(kvs, results, ids):
        parts = [next((at for at, (a, b) in enumerate(zip(full, own)) if a != b), None)
                 for full, own in zip(ids[0], texts)]
        assert list(drift.differs) == parts, str(kv)
        assert drift.decode_tok_s > 0
    assert results[0].differs == (None, None, None)
    assert any(place is not None for drift in results[2:] for place in drift.differs), "or this says nothing"


def test_buckets_of_generated_text_are_means_over_steps_that_read_one_token_each(exact):
    spec, prompts = parse_kv("snapkv(0.3, window=8)"), random_ids(3, 150, seed=4)[:1]
    _, drift = drifts(exact, [parse_kv("none"), spec], prompts)
    rows = {}
    (full,) = generate(exact, prompts.tolist(), Sampling(max_tokens=TOKENS, ignore_eos=True),
                       kv=parse_kv("none"))
    for kv in (parse_kv("none"), spec):
        cache = KVCache(exact.config, kv, exact.dtype)
        row = cache.add()
        rows[str(kv)] = [exact.model(prompts, cache=Batch(cache, [row], "prefill_end"))[0, -1]]
        for token in full.token_ids[:-1]:
            logits = exact.model(torch.tensor([[token]]), cache=Batch(cache, [row], "decode"))
            rows[str(kv)].append(logits[0, 0])
    reference, own = (torch.stack(logits).float().log_softmax(-1) for logits in rows.values())
    kl = KL.score(reference, own, torch.tensor(full.token_ids))
    for bucket, (low, high) in zip(drift.buckets, ((0, 16), (16, TOKENS)), strict=True):
        assert (bucket.low, bucket.high) == (low, high)
        assert bucket.values["kl_mean"].value == pytest.approx(float(kl[low:high].mean()), rel=1e-2, abs=1e-4)
    noise = 1e-5 if exact.dtype == torch.float32 else 2e-3  # of prompts read operation by operation
    assert kl[0] == pytest.approx(0, abs=noise), "the policy acts behind the prompt's last token"


def test_steps():
    assert steps_of(10) == [0, 10] and steps_of(16) == [0, 16] and steps_of(128) == [0, 16, 64, 128]
