"""Models that write blocks are scored where tokens are masked, each once: a bound of the likelihood."""

import dataclasses
import itertools
import json

import pytest
import torch

from quantkit.evaluation.long.run import LongSettings, evaluate_long
from quantkit.evaluation.quality import blocks
from quantkit.evaluation.quality.blocks import (
    SIDE_BY_SIDE,
    MaskedText,
    begin_text,
    cycles,
    masked_logits,
    masked_states,
    orders_of,
)
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.hidden_states import states_of
from quantkit.evaluation.run import EvalSettings, evaluate
from quantkit.evaluation.tasks import scoring
from quantkit.evaluation.tasks.run import run_tasks
from quantkit.evaluation.tasks.scoring import DRAWS, Scorer, ScoringRequest
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model
from tests.evaluation.tasks.test_run import DATA, OWN
from tests.models.test_block_diffusion import MASK, SIZES, diffusing


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(family)`` → the folder of a model that writes blocks."""
    def make(family="sdar", dtype="float32", **keys):
        shape = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        return diffusing(tmp_path_factory.mktemp("scored") / "m", family, SIZES[family], dtype=dtype,
                         **shape | keys)

    return make


def some_ids(length, seed=0):
    return torch.randint(4, 290, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def cost(loaded, ids, masked, size):
    """−log p of each token of ``masked`` beside the rest of its block: torch's operators, no cache."""
    text = list(ids[:(max(masked) // size + 1) * size])
    text += [MASK] * (-len(text) % size)
    for at in masked:
        text[at] = MASK
    logits = loaded.model._model(torch.tensor([text]))[0].double()
    logits[:, MASK] = -torch.inf
    return {at: -float(logits[at].log_softmax(-1)[ids[at]]) for at in masked}


def test_cycles_mask_every_number_of_tokens_and_every_choice_of_them_alike():
    seen = {}
    for permutation in itertools.permutations(range(5)):
        parts = cycles(permutation)
        assert sorted(itertools.chain(*parts)) == [0, 1, 2, 3, 4]
        for cycle in parts:
            seen[tuple(sorted(cycle))] = seen.get(tuple(sorted(cycle)), 0) + 1
    for members, count in seen.items():  # of 120: a fifth by length, then by the choice of the other four
        choices = len(list(itertools.combinations(range(4), len(members) - 1)))
        assert count * choices == 24
    assert len(seen) == 31


def test_their_mean_is_that_of_all_orders(made):
    """Uncovered one by one in each of the orders there are, written out."""
    loaded, ids, known = load(str(made())), some_ids(12), 5
    free = [range(known, 8), range(8, 12)]
    expected = sum(cost(loaded, ids, order[number:], 4)[order[number]] / len(orders)
                   for places in free for orders in [list(itertools.permutations(places))]
                   for order in orders for number in range(len(order)))
    cache = KVCache(loaded.config, KVSpec(), loaded.dtype)
    row = begin_text(loaded, cache, ids, known)
    totals, orders = [], orders_of(loaded, ids, known, 144)
    assert len(set(orders)) == 6 * 24 and len(orders_of(loaded, ids, known, 143)) == 143
    for order in orders:
        fork = cache.fork(row)
        with torch.inference_mode():
            states, = masked_states(loaded, cache, [MaskedText(fork, ids, known, order)])
            logprobs = masked_logits(loaded, states).double().log_softmax(-1)
        totals.append(-float(logprobs.gather(1, torch.tensor(ids[known:])[:, None]).sum()))
        cache.free([fork])
    assert sum(totals) / len(totals) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["sdar", "a2d-qwen2", "a2d-llama"])
def test_each_token_is_predicted_where_it_is_masked(made, family):
    """Beside a plain loop: a block that is known in part, one that the text ends in, and several texts of
    which each has other masks, alike in company and alone."""
    loaded, size = load(str(made(family))), SIZES[family]
    windows = torch.tensor([some_ids(3 * size + 3, seed) for seed in range(SIDE_BY_SIDE + 2)])
    prompt = size + 1
    alone = next(states_of(loaded, windows[-1:], prompt))
    window, start, expected = windows[-1].tolist(), prompt + 1, {}
    for permutation in orders_of(loaded, window, start, 1)[0]:
        for cycle in cycles(permutation):
            expected |= cost(loaded, window, [start + at for at in cycle], size)
        start += len(permutation)
    assert sorted(expected) == list(range(prompt + 1, len(window)))
    with torch.inference_mode():
        logprobs = masked_logits(loaded, alone).double().log_softmax(-1)
    costs = -logprobs.gather(1, windows[-1, prompt + 1:, None])[:, 0]
    assert costs.tolist() == pytest.approx([expected[at] for at in sorted(expected)], rel=1e-4)
    assert torch.equal(list(states_of(loaded, windows, prompt))[-1], alone)
    by_operation = dataclasses.replace(loaded, model=loaded.model._model)
    for kv, share in (("none", 1e-4), ("int8", 0.02), (f"window({2 * size})", 1e-4)):
        forced = (TeacherForcedModel(model, parse_kv(kv), prompt) for model in (loaded, by_operation))
        first, second = (next(states_of(model, windows[-1:], prompt)) for model in forced)
        assert (first - second).abs().max() < share * first.abs().max()


def test_a_whole_comparison(made, tmp_path):
    folder = made(dtype="bfloat16", mask_token_id=2)  # no part of a text
    packed = quantize(str(folder), "int8", tmp_path / "int8", calibration=None).out
    coarse = quantize(str(folder), "int4-rtn", tmp_path / "int4", calibration=None).out
    settings = EvalSettings(window=30, windows=10, noise_floor=True)
    told = []
    result = evaluate([str(folder), str(packed), str(coarse)], settings, announce=told.append)
    first, eight, four = [row.metrics["kl_mean"].value for row in result.rows]
    assert first == 0 < eight < four
    assert any("speed isn't measured" in line and "writes blocks" in line for line in told)
    assert result.protocol.block == 4 and result.protocol.scored == 10 * 29
    assert result.metrics["perplexity"].title == "perplexity bound"
    assert any("upper bound" in line for line in result.protocol.lines())
    stored = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert stored["protocol"]["block"] == 4 and stored["results"][2]["kl_exact"] > 0
    caches = tuple(parse_kv(kv) for kv in ("none", "int8", "int4", "snapkv(0.5, window=8)"))
    through = evaluate([str(folder)], EvalSettings(window=256, windows=3, prompt=150, kv=caches, speed=False))
    plain, eight, four, half = through.rows
    short = EvalSettings(window=32, windows=2, speed=False)  # by torch's operators, in float32
    exact = evaluate([str(packed), str(coarse)], dataclasses.replace(short, dtype="float32"))
    assert exact.rows[1].metrics["kl_mean"].value > 0 and exact.protocol.dtype == "float32"
    noise = evaluate([str(packed)], dataclasses.replace(short, noise_floor=True))
    assert noise.rows[0].metrics["kl_exact"].value > 0
    assert plain.metrics["kl_mean"].value == 0 < eight.metrics["kl_mean"].value < min(
        four.metrics["kl_mean"].value, half.metrics["kl_mean"].value)
    assert plain.kv_bytes > eight.kv_bytes > 0 and four.kv_bytes_per_token < eight.kv_bytes_per_token


def test_tasks_by_the_bound(made):
    loaded = load(str(made()))
    context = tuple(some_ids(18, 5))
    requests = [ScoringRequest(context, (7,)), ScoringRequest(context, tuple(some_ids(6, 6))),
                ScoringRequest(tuple(some_ids(3, 7)), tuple(some_ids(20, 8)))]
    counted = []
    scores = Scorer(loaded).score(requests, counted.append)
    assert sum(counted) == 3 and scores == Scorer(loaded, batch=3).score(requests)
    assert scores[0].logprob == pytest.approx(-cost(loaded, (*context, 7), [18], 4)[18], rel=1e-4)
    # two tokens of a block, and then four: every order there is
    first, second = requests[1].continuation[:2]
    whole = cost(loaded, (*context, first, second), [18, 19], 4)
    left, right = (cost(loaded, (*context, first, second), [at], 4)[at] for at in (18, 19))
    both = Scorer(loaded).score([ScoringRequest(context, (first, second))])[0]
    assert -both.logprob == pytest.approx((sum(whole.values()) + left + right) / 2, rel=1e-4)
    assert len(orders_of(loaded, (*context, *requests[1].continuation), 18, DRAWS)) == DRAWS
    with pytest.raises(UsageError, match="token 18 of a text is the mask"):
        Scorer(loaded).score([ScoringRequest(context, (MASK, 5))])
    whole_context = ScoringRequest((5,), tuple(some_ids(loaded.config.max_position_embeddings - 1, 9)))
    assert Scorer(loaded).score([whole_context])[0].logprob < 0
    assert Scorer(loaded).max_length == loaded.config.max_position_embeddings - 1


def test_what_goes_side_by_side_fits_in_memory(made, monkeypatch):
    loaded, windows = load(str(made())), torch.tensor([some_ids(40, seed) for seed in range(5)])
    together = torch.stack(list(states_of(loaded, windows, 3)))
    requests = [ScoringRequest((5,), tuple(some_ids(70, seed))) for seed in range(3)]
    scores = Scorer(loaded).score(requests)
    rows, hidden = [], loaded.model.hidden

    def counted(ids, *rest):
        rows.append(len(ids))
        return hidden(ids, *rest)

    monkeypatch.setattr(loaded.model, "hidden", counted)
    monkeypatch.setattr(blocks, "KV_BYTES", 1)
    monkeypatch.setattr(scoring, "LOGITS", 1)
    assert torch.equal(torch.stack(list(states_of(loaded, windows, 3))), together)
    apart = Scorer(loaded).score(requests)
    assert [score.logprob for score in apart] == pytest.approx([score.logprob for score in scores], rel=1e-6)
    assert set(rows) == {1}


def test_a_policy_reads_the_whole_prompt_again_as_in_serving(made):
    """Also the tokens of it that are part of the first block."""
    loaded, kv = load(str(made("a2d-llama", max_position_embeddings=1024))), parse_kv("kvzip(0.5)")
    prompt = some_ids(69, 2)
    engine = Engine(loaded, kv=kv, max_batch=1)
    request = engine.submit(prompt, Sampling(max_tokens=16, ignore_eos=True))
    while not request.result.denoising_steps:
        engine.step()
    kept = engine.cache.positions(request.kv.sequence, 0).tolist()
    engine.close()
    cache = KVCache(loaded.config, kv, loaded.dtype)
    with torch.inference_mode():
        row = begin_text(loaded, cache, [*prompt, 5], 69)
    assert cache.positions(row, 0).tolist() == kept and len(kept[0]) < 64


@pytest.mark.filterwarnings("ignore:.*contexts were cut")
def test_tasks_that_lm_eval_asks(made, tmp_path):
    for name, rows in DATA.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ppl.yaml").write_text(OWN)
    loaded = load(str(made(mask_token_id=2)))
    scores = {f"{score.task}/{score.metric}": score for score in run_tasks(
        loaded, ["arc_easy", "gsm8k", str(tmp_path / "ppl.yaml")], data=tmp_path, limit=2)}
    assert {"arc_easy/acc", "ppl/word_perplexity"} <= scores.keys() and any("gsm8k" in key for key in scores)
    with pytest.raises(UsageError, match="lambada_openai"):
        run_tasks(loaded, ["lambada_openai"], data=tmp_path)


def test_what_cannot_be_scored(made, tmp_path):
    folder = str(made())
    beside = str(tiny_model(tmp_path / "plain", "qwen3", num_attention_heads=2, num_key_value_heads=1))
    settings = EvalSettings(window=32, windows=2, speed=False)
    with pytest.raises(UsageError, match="don't write alike"):
        evaluate([folder, beside], settings)
    with pytest.raises(UsageError, match="h2o"):
        evaluate([folder], EvalSettings(window=32, windows=2, speed=False, kv=(parse_kv("h2o(0.5)"),)))
    with pytest.raises(UsageError, match=r"decode>=1.*isn't measured"):
        evaluate([folder], EvalSettings(window=32, windows=2, needs_speed="decode>=1"))
    with pytest.raises(UsageError, match=r"decode_tok_s.*isn't measured"):
        evaluate([folder], EvalSettings(window=32, windows=2, plot=("decode_tok_s",)))
    with pytest.raises(UsageError, match="--peer"):
        evaluate([folder], EvalSettings(window=32, windows=2, peers=("llama.cpp:x.gguf",)))
    with pytest.raises(UsageError, match="writes blocks"):
        evaluate_long(folder, LongSettings())
    loaded = load(folder)
    with pytest.raises(UsageError, match="the mask"):
        next(states_of(loaded, torch.tensor([[5, 6, MASK, 7]]), 0))
