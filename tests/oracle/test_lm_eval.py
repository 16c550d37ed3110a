"""The same scores as lm-eval's own ``hf`` model: same tokens, same log-likelihoods, same choices.

In float32 both give the same numbers. In bfloat16 each adds in an order of its own, and log-likelihoods
differ by a few tenths, lm-eval's from its own float32 ones too: a choice between two options that are
as close as that is a toss-up, whoever makes it.
"""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quantkit.evaluation.tasks.lm_eval_model import lm_eval_model
from quantkit.evaluation.tasks.run import chosen, prepare_tasks
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
huggingface = pytest.importorskip("lm_eval.models.huggingface",
                                  reason="lm-eval is not installed (extra: lm-eval)")

WORDS = re.findall(r"\S+", "the cat and dog in house of a man sat on red mat with tall hat Ünïcode 12,5")
ITEMS = 200


def text(draw, most):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def asks(*args):
    return [SimpleNamespace(args=one, task_name=None) for one in args]


def hf_model(folder, tokenizer=None, dtype=torch.float32, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer or folder)
    return huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu")


@pytest.fixture(params=["llama", "qwen2"], scope="module")
def pair(request, tmp_path_factory):
    """Ours and theirs of one tiny model: with BOS and without."""
    folder = tiny_model(tmp_path_factory.mktemp("oracle") / "tiny", request.param, dtype="float32")
    return lm_eval_model(load(str(folder)), batch=8), hf_model(folder)


def test_what_a_model_says_of_itself(pair):
    ours, theirs = pair
    for name in ("max_length", "max_gen_toks", "prefix_token_id", "eot_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_tokens(pair):
    ours, theirs = pair
    draw = random.Random(0)
    assert ours.tok_encode("<s>the cat") == theirs.tok_encode("<s>the cat")
    for _ in range(50):
        context = text(draw, 9) + draw.choice(["", " ", "\n", "  \n"])
        answer = draw.choice(["", " "]) + text(draw, 4)
        found = ours.encode_pair(context, answer)
        assert (list(found.context), list(found.continuation)) == theirs._encode_pair(context, answer)


def test_log_likelihoods(pair):
    ours, theirs = pair
    draw = random.Random(1)
    pairs = [(text(draw, 20) + draw.choice(["", " "]), " " + text(draw, 5)) for _ in range(25)]
    question = text(draw, 9) + "?"
    pairs += [(question, f" {letter}") for letter in "ABCD"]  # one pass for all of them
    pairs += [("", text(draw, 4)), ("the cat " * 300, " sat on"), ("<s>the", " cat")]
    with pytest.warns(UserWarning, match="1 of 32 requests"):
        found = ours.loglikelihood(asks(*pairs))
    expected = theirs.loglikelihood(asks(*pairs), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]


def test_rolling_log_likelihoods(pair):
    draw = random.Random(2)
    texts = asks(*((text(draw, most),) for most in (3, 30, 900)), ("the cat " * 500,))
    found, expected = (model.loglikelihood_rolling(texts, disable_tqdm=True) for model in pair)
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_greedy_texts(pair):
    ours, theirs = pair
    draw = random.Random(3)
    contexts = [text(draw, 12) for _ in range(4)]
    for options in ({"max_gen_toks": 12}, {"max_gen_toks": 12, "until": ["e", " t"], "do_sample": False}):
        # a prompt at a time: theirs pads a batch on the left, and adds BOS or not as the first text says
        found = ours.generate_until(asks(*((context, options) for context in contexts)))
        expected = [theirs.generate_until(asks((context, options)), disable_tqdm=True)[0]
                    for context in contexts]
        assert found == expected


def test_choices_of_a_task(pair, tmp_path):
    draw = random.Random(4)
    rows = [{"query": f"Question: {text(draw, 9)}?", "choices": [text(draw, 5) for _ in range(4)], "gold": 0}
            for _ in range(40)]
    (tmp_path / "arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric, ours, theirs in compared("arc_easy", tmp_path, None, *pair):
        assert ours == theirs, metric
    kept = lm_eval_model(pair[0].loaded, kv=parse_kv("bf16"))
    for _, ours, theirs in compared("arc_easy", tmp_path, None, kept, pair[1]):
        assert sum(a == b for a, b in zip(ours, theirs)) >= 38


def compared(name, data, limit, *models):
    """``metric, choices of the first, choices of the second``."""
    (ready,) = prepare_tasks([name], data=data, limit=limit)
    instances = ready.parts[0].instances
    answers = [model.loglikelihood(instances, disable_tqdm=True) for model in models]
    for metric in ("acc", "acc_norm"):
        found = []
        for results in answers:
            rows = {}
            for one, result in zip(instances, results, strict=True):
                rows.setdefault(one.doc_id, (one.doc["choices"], []))[1].append(result)
            found.append([chosen(metric, choices, own) for choices, own in rows.values()])
        yield metric, *found


@pytest.fixture(scope="module")
def real(smollm2, tmp_path_factory):
    """``real(dtype)`` → SmolLM2, ours and theirs: transformers reads the same file by itself."""
    source, folder = open_source(smollm2), tmp_path_factory.mktemp("tokenizer")
    for name, raw in source.side_files().items():
        (folder / name).write_bytes(raw)

    def make(dtype):
        theirs = hf_model(source.path.parent, folder, torch.bfloat16, gguf_file=source.path.name)
        weights = dict(theirs.model.named_parameters())
        for name in ("model.embed_tokens.weight", "model.layers.29.mlp.down_proj.weight"):
            assert torch.equal(weights[name].data, source.tensor(name))
        theirs.model.to(getattr(torch, dtype))
        return lm_eval_model(load(smollm2, dtype=dtype)), theirs

    yield make
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arc_easy", "piqa"])
def test_a_real_model_chooses_the_same(real, shared_data, name):
    """The bf16 model's weights, arithmetic in float32: what is left is the adapter."""
    for metric, ours, theirs in compared(name, shared_data / "tasks", ITEMS, *real("float32")):
        same = sum(a == b for a, b in zip(ours, theirs))
        assert len(ours) == ITEMS and same >= 0.99 * ITEMS, f"{metric}: {same} of {ITEMS}"


@pytest.mark.slow
def test_in_bfloat16_we_are_no_further_from_the_truth_than_they_are(real, shared_data):
    (ready,) = prepare_tasks(["arc_easy"], data=shared_data / "tasks", limit=20)
    instances = ready.parts[0].instances
    truth = [one[0] for one in real("float32")[0].loglikelihood(instances)]
    ours, theirs = (np.subtract([one[0] for one in model.loglikelihood(instances, disable_tqdm=True)], truth)
                    for model in real("bfloat16"))
    assert np.abs(ours).mean() < max(1.2 * np.abs(theirs).mean(), 0.05)
