"""The adapter: texts become the tokens that lm-eval's own models make, and its requests are answered."""

import random
import sys
from types import SimpleNamespace

import pytest

from quantkit.evaluation.tasks import lm_eval_model as module
from quantkit.evaluation.tasks.lm_eval_model import LmEvalAdapter, lm_eval_model, rolling, sampling_of
from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest
from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

CHAT = [{"role": "user", "content": "Hi"}]


def asks(*args):
    return [SimpleNamespace(args=one) for one in args]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model without a BOS token."""
    return load(str(tiny_model(tmp_path_factory.mktemp("models") / "qwen", "qwen2")))


@pytest.fixture
def without_lm_eval(monkeypatch):
    module._bound.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    yield
    module._bound.cache_clear()


def test_without_lm_eval_it_says_what_to_install(loaded, without_lm_eval):
    with pytest.raises(QuantkitError) as caught:
        lm_eval_model(loaded)
    assert caught.value.next == "pip install lm-eval"


def test_it_is_an_lm(loaded):
    api = pytest.importorskip("lm_eval.api.model")
    model = lm_eval_model(loaded)
    assert isinstance(model, api.LM) and (model.rank, model.world_size) == (0, 1)
    assert model.max_length == 512 and model.max_gen_toks == 256
    found = model.loglikelihood(asks(("the cat", " sat on"), ("the cat", " sat in")))
    assert len(found) == 2 and found[0][0] < 0 and isinstance(found[0][1], bool)


def test_special_tokens(loaded, qwen):
    adapter = LmEvalAdapter(loaded)
    assert (adapter.prefix_token_id, adapter.eot_token_id) == (1, 3)
    assert adapter.tok_encode("the")[0] == 1 and adapter.tok_encode("the", add_special_tokens=False)[0] != 1
    assert adapter.tok_encode("<s>the") == adapter.tok_encode("the")
    assert LmEvalAdapter(qwen).prefix_token_id == LmEvalAdapter(qwen).eot_token_id == 3
    qwen = SimpleNamespace(**vars(qwen) | {"tokenizer": SimpleNamespace(eos_id=None, bos_id=None)})
    with pytest.raises(UsageError, match="no end-of-sequence"):
        _ = LmEvalAdapter.eot_token_id.fget(SimpleNamespace(loaded=qwen))


def test_pairs_are_cut_where_the_context_ends(loaded, qwen):
    for model in (loaded, qwen):
        adapter = LmEvalAdapter(model)
        decode = model.tokenizer.decode
        for context, answer in (("the cat", " sat"), ("the cat ", "sat"), ("a\n \n", "x"), ("one two", "")):
            pair = adapter.encode_pair(context, answer)
            assert pair.context == tuple(adapter.tok_encode(context.rstrip()))
            assert decode(pair.continuation) == context[len(context.rstrip()):] + answer
        ids = adapter.tok_encode("word", add_special_tokens=False)
        assert adapter.encode_pair("", "word") == ScoringRequest((adapter.prefix_token_id,), tuple(ids))
        assert decode(adapter.encode_pair("  ", "word").continuation) == "  word"
    assert LmEvalAdapter(loaded).encode_pair("", "<s>word") == LmEvalAdapter(loaded).encode_pair("", "word")


def test_an_answer_without_a_token_of_its_own(loaded):
    # "i" and "n" are one token
    with pytest.raises(UsageError, match="no token of its own"):
        LmEvalAdapter(loaded).loglikelihood(asks(("the ca i", "n")))


def test_the_scorer_is_given_the_pairs(loaded):
    for kv in ("none", "int8"):
        adapter = LmEvalAdapter(loaded, kv=parse_kv(kv), batch=2)
        pairs = [("the cat", " sat"), ("", "on the"), ("it is ", "so")]
        expected = Scorer(loaded, parse_kv(kv)).score([adapter.encode_pair(*pair) for pair in pairs])
        found = adapter.loglikelihood(asks(*pairs))
        assert [logprob for logprob, _ in found] == pytest.approx([one.logprob for one in expected], abs=0.2)


def test_it_runs_as_the_checkpoint_says(tmp_path):
    quantize(str(tiny_model(tmp_path / "tiny")), "int8-kv8", tmp_path / "OUT")
    model = load(str(tmp_path / "OUT"))
    assert LmEvalAdapter(model).kv == parse_kv("int8") == LmEvalAdapter(model).scorer.kv
    assert LmEvalAdapter(model, kv=parse_kv("none")).kv == parse_kv("none")


def test_rolling_as_lm_eval_cuts():
    utils = pytest.importorskip("lm_eval.utils")
    draw = random.Random(0)
    for _ in range(60):
        length, ids = draw.randint(1, 12), [draw.randrange(300) for _ in range(draw.randint(0, 50))]
        theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(
            token_list=ids, prefix_token=1, max_seq_len=length, context_len=1))
        assert [(list(p.context), list(p.continuation)) for p in rolling(ids, 1, length)] == [
            (context, answer) for context, answer in theirs]


def test_rolling_likelihoods(loaded):
    told = []
    adapter = LmEvalAdapter(loaded, progress=told.append)
    text = "the cat and the dog " * 80
    found = adapter.loglikelihood_rolling(asks((text,), ("on it",)))
    short = adapter.loglikelihood(asks(("<s>", "on it")))  # what stands before it is BOS
    ids = adapter.tok_encode(text)
    assert len(ids) > 512, "several pieces"
    pieces = Scorer(loaded).score(list(rolling(ids, 1, 512)))
    assert found[0] == pytest.approx(sum(piece.logprob for piece in pieces), abs=0.5)
    assert found[1] < short[0][0] + 1e-6  # a text is given its BOS, and before it the prefix: scored too
    assert (told[0].done, told[0].total) == (0, len(pieces) + 1) and told[-1].done == told[-1].total


def test_generation(loaded):
    told = []
    adapter = LmEvalAdapter(loaded, progress=told.append, batch=2)
    contexts = ["the cat", "a", "it is in the", ""]
    found = adapter.generate_until(asks(*((context, {"max_gen_toks": 12}) for context in contexts)))
    prompts = [adapter.tok_encode(context) for context in contexts]
    expected = generate(loaded, prompts, Sampling(max_tokens=12))
    assert found == [one.text for one in expected] and any(found)
    assert [event.done for event in told[-3:]] == [0, 2, 4]
    stop = expected[0].text[3:5]
    (cut,) = adapter.generate_until(asks((contexts[0], {"max_gen_toks": 12, "until": stop})))
    assert stop and cut == expected[0].text.split(stop)[0]


def test_generation_through_a_compressed_cache(loaded):
    kv = parse_kv("window(4, sinks=0)")
    asked = asks(("the cat and the dog and the man", {"max_gen_toks": 16}))
    (found,) = LmEvalAdapter(loaded, kv=kv).generate_until(asked)
    assert found == generate(loaded, [loaded.tokenizer.encode(asked[0].args[0])], Sampling(max_tokens=16),
                             kv=kv)[0].text
    assert found != LmEvalAdapter(loaded).generate_until(asked)[0]


def test_long_prompts_lose_their_beginning(loaded):
    adapter = LmEvalAdapter(loaded)
    text = "the cat and the dog " * 80
    with pytest.warns(UserWarning, match="1 of 1 contexts"):
        (found,) = adapter.generate_until(asks((text, {"max_gen_toks": 8})))
    assert found == generate(loaded, [adapter.tok_encode(text)[-504:]], Sampling(max_tokens=8))[0].text
    with pytest.raises(UsageError, match="no room"):
        adapter.generate_until(asks(("a", {"max_gen_toks": 512})))


@pytest.mark.parametrize(("options", "expected"), [
    ({}, Sampling(max_tokens=256, seed=0)),
    ({"until": "\n"}, Sampling(max_tokens=256, seed=0, stop=("\n",))),
    ({"until": ["a", ""], "max_new_tokens": 9, "do_sample": False, "temperature": 0.7, "top_p": 0.5},
     Sampling(max_tokens=9, seed=0, stop=("a",))),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.5, "max_tokens": 3},
     Sampling(max_tokens=3, seed=0, temperature=0.7, top_p=0.5)),
    ({"temperature": 0.0, "repetition_penalty": 1.2},
     Sampling(max_tokens=256, seed=0, repetition_penalty=1.2))])
def test_settings(options, expected):
    before = dict(options)
    assert sampling_of(options) == expected and options == before


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"temperature": -1.0}, {"max_gen_toks": 0}])
def test_settings_that_cannot_be(options):
    with pytest.raises(UsageError):
        sampling_of(options)


def test_chat(loaded):
    adapter = LmEvalAdapter(loaded)
    text = adapter.apply_chat_template(CHAT)
    assert text == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert adapter.tok_encode(text) == loaded.tokenizer.chat(CHAT)
    begun = adapter.apply_chat_template([*CHAT, {"role": "assistant", "content": "Well,"}], False)
    assert begun == text + "Well,"
    assert adapter.chat_template(True) == "" and adapter.chat_template(False) is None
    assert "/" not in adapter.tokenizer_name
