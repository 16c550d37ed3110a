"""What is excluded, with which chance the rest comes, and that a seed means something."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.runtime.penalties import change_logits
from quantkit.runtime.sampler import (
    MIN_TEMPERATURE,
    Sampler,
    Sampling,
    StopStrings,
    filter_tokens,
    sample_tokens,
)
from quantkit.structure.base import ConstraintError
from quantkit.support.errors import QuantkitError, UsageError

settings_of = st.builds(
    Sampling, temperature=st.sampled_from([MIN_TEMPERATURE, 0.3, 0.8, 1.0, 5.0, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 7, 10**6]), top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]), repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]))
logits_of = st.lists(st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, 1e30, -1e30])),
                     min_size=1, max_size=40).map(torch.tensor)


def adjust(logits, history, sampling, prompt_tokens=0):
    """What an unconstrained token is drawn from."""
    return filter_tokens(change_logits(logits, history, sampling, prompt_tokens), sampling)


def random_logits(seed, size=50):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.sampled(5)
@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("settings", [
    {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}, {"top_p": 0.01}, {"min_p": 0.9},
    {"top_k": 400}])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.9])
def test_the_same_tokens_with_the_same_chances_as_transformers(seed, settings, temperature):
    hf = pytest.importorskip("transformers")
    sampling = Sampling(temperature=temperature, **settings)
    history = [1, 4, 4, 7, 33]
    chain = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
                                    hf.TemperatureLogitsWarper(temperature)])
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    logits = random_logits(seed)
    theirs = chain(torch.tensor([history]), logits[None].clone())[0].softmax(-1)
    ours = adjust(logits, history, sampling).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@given(logits_of, settings_of)
def test_something_is_always_left_and_it_is_the_best(logits, sampling):
    history = [0]
    scores = adjust(logits, history, sampling)
    assert not torch.isnan(scores).any()
    chances = scores.softmax(-1)
    assert math.isclose(float(chances.sum()), 1, rel_tol=1e-4)
    penalized = adjust(logits, history, Sampling(repetition_penalty=sampling.repetition_penalty))
    assert chances[int(penalized.argmax())] == chances.max()
    assert 0 <= Sampler(sampling)(logits, history) < len(logits)


@given(logits_of, st.integers(1, 10))
def test_top_k_leaves_k_or_what_ties_with_the_last(logits, k):
    kept = torch.isfinite(adjust(logits, [], Sampling(temperature=1, top_k=k)))
    k = min(k, len(logits))
    shifted = logits - logits.max()
    assert torch.equal(kept, shifted >= shifted.sort(descending=True).values[k - 1])


@given(logits_of, st.floats(0.05, 0.95))
def test_top_p_leaves_the_fewest_that_reach_p(logits, p):
    chances = logits.softmax(-1)
    kept = torch.isfinite(adjust(logits, [], Sampling(temperature=1, top_p=p)))
    assert chances[kept].sum() >= p - 1e-4
    assert chances[kept].sum() - chances[kept].min() <= p + 1e-4
    assert not kept.all() or chances.sum() - chances.min() <= p + 1e-4
    if not kept.all():
        assert chances[kept].min() >= chances[~kept].max()


@given(logits_of, settings_of)
def test_the_logits_are_not_written_to(logits, sampling):
    before = logits.clone()
    Sampler(sampling)(logits, [0])
    assert torch.equal(logits, before)


EXTREMES = st.builds(
    Sampling, temperature=st.sampled_from([MIN_TEMPERATURE, 1.0, 100.0]), top_k=st.sampled_from([0, 1,
                                                                                                 2**31]),
    top_p=st.sampled_from([5e-324, 1e-310, 1e-45, 1e-38, math.nextafter(1, 0), 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 1e-310, 1e-38, math.nextafter(1, 0), 1.0]),
    repetition_penalty=st.sampled_from([0.01, math.nextafter(1, 0), math.nextafter(1, 2), 100.0]),
    seed=st.sampled_from([None, 0, 2**63 - 1]))


@given(st.lists(st.sampled_from([0.0, 1e-45, -1e-45, 1.0, 3e36, -3e36, 3.4e38, -3.4e38]), min_size=1,
                max_size=9).map(torch.tensor), EXTREMES, st.lists(st.integers(0, 8), max_size=9))
def test_extreme_settings_leave_chances_that_are_numbers(logits, sampling, history):
    history = [token for token in history if token < len(logits)]
    chances = adjust(logits, history, sampling).softmax(-1)
    assert torch.isfinite(chances).all() and chances.sum() == pytest.approx(1, abs=1e-5)
    assert 0 <= Sampler(sampling)(logits, history) < len(logits)


def test_a_token_is_penalized_once_however_often_it_came():
    sampling = Sampling(repetition_penalty=2.0)
    assert adjust(torch.tensor([2.0, -2.0, 1.0]), [0, 0, 1, 0], sampling).tolist() == [1.0, -4.0, 1.0]
    assert adjust(torch.tensor([2.0, -2.0]), [], sampling).tolist() == [2.0, -2.0]


def test_greedy_takes_the_lowest_of_equals():
    assert Sampler(Sampling())(torch.tensor([0.0, 3.0, 3.0, 3.0]), []) == 1


def test_a_seed_repeats_and_another_doesnt():
    def draw(seed):
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        return [sampler(random_logits(i), []) for i in range(30)]

    assert draw(5) == draw(5) != draw(6)
    assert draw(2**63 - 1) == draw(2**63 - 1)


def test_without_a_seed_two_samplers_differ():
    assert len({tuple(Sampler(Sampling(temperature=2))(random_logits(0), []) for _ in range(1))
                for _ in range(40)}) > 1


def test_samplers_dont_disturb_each_other_or_the_global_generator():
    one, other = Sampler(Sampling(temperature=1, seed=1)), Sampler(Sampling(temperature=1, seed=2))
    state = torch.get_rng_state()
    mixed = []
    for i in range(20):
        mixed.append(one(random_logits(i), []))
        other(random_logits(i), [])
    alone = Sampler(Sampling(temperature=1, seed=1))
    assert mixed == [alone(random_logits(i), []) for i in range(20)]
    assert torch.equal(state, torch.get_rng_state())


def test_draws_follow_the_chances():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    sampler = Sampler(Sampling(temperature=1, seed=0))
    counts = torch.bincount(torch.tensor([sampler(logits, []) for _ in range(4000)]), minlength=3) / 4000
    torch.testing.assert_close(counts, logits.exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_outputs_nonsense_is_an_error(bad):
    with pytest.raises(QuantkitError, match="not finite"):
        Sampler(Sampling())(torch.tensor([0.0, bad]), [])


@pytest.mark.parametrize(("field", "value"), [
    ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1), ("temperature",
                                                                                          math.nan),
    ("temperature", 10**400), ("top_p", 10**400), ("seed", 10**400),
    ("temperature", math.inf), ("temperature", 1e-9), ("temperature", "1"), ("top_k", -1), ("top_k", 2.5),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan), ("seed", -1),
    ("seed", 2**63), ("seed", 1.0), ("stop", ("",)), ("stop", "END"), ("stop", (3,)), ("stop", ("a",) * 99),
    ("stop", ("a" * 9999,)), ("ignore_eos", 1)])
def test_a_bad_setting_is_named(field, value):
    with pytest.raises(UsageError, match=f"^{field} is"):
        Sampling(**{field: value})


def test_a_list_of_stop_strings_is_taken():
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert hash(Sampling(stop=["a"])) == hash(Sampling(stop=("a",)))


class Only:
    """A constraint that allows a few tokens."""

    ended = False

    def __init__(self, *allowed):
        self.allowed, self.seen = list(allowed), []

    def mask(self, scores):
        self.seen.append(scores)
        return torch.full_like(scores, -torch.inf).index_copy(
            0, torch.tensor(self.allowed, dtype=torch.long), scores[self.allowed])

    def accept(self, token):
        pass


def test_a_bias_is_added_before_the_repetition_penalty_and_the_others():
    sampling = Sampling(logit_bias=[[0, 2], (1, -1.5)], repetition_penalty=2, presence_penalty=1)
    assert adjust(torch.tensor([0.0, 0.5, 3.0]), [2, 1, 0], sampling, 1).tolist() == [0.0, -3.0, 1.5]


@given(st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=30), st.data())
def test_penalties_are_openais_formula(row, data):
    logits, ids = torch.tensor(row), st.integers(0, len(row) - 1)
    history = data.draw(st.lists(ids, max_size=20))
    prompt = data.draw(st.integers(0, len(history)))
    numbers = st.sampled_from([-2.0, -0.5, 0.0, 0.3, 2.0])
    presence, frequency = data.draw(numbers), data.draw(numbers)
    bias = data.draw(st.dictionaries(ids, st.floats(-100, 100, width=32)))
    scores = adjust(logits, history, Sampling(presence_penalty=presence, frequency_penalty=frequency,
                                              logit_bias=tuple(bias.items())), prompt)
    for token, logit in enumerate(row):
        count = history[prompt:].count(token)
        expected = logit + bias.get(token, 0) - count * frequency - (count > 0) * presence
        assert math.isclose(scores[token], expected, abs_tol=1e-4)


@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=1, seed=1), Sampling(temperature=1, top_k=1, seed=2),
    Sampling(temperature=100, top_p=1e-6, seed=3), Sampling(temperature=1, min_p=1, seed=4),
    Sampling(logit_bias=((0, 100),)), Sampling(temperature=0.5, repetition_penalty=0.01, seed=5)])
def test_a_constraint_masks_before_tokens_are_dropped(sampling):
    logits = torch.tensor([9.0, 8.0, 7.0, 1.0, 0.0])  # top-k, top-p and min-p alone would leave only token 0
    sampler = Sampler(sampling, 1, Only(3, 4))
    assert sampler.on_host
    chosen = {sampler(logits, [0]) for _ in range(20)}
    assert chosen <= {3, 4} and (3 in chosen or not sampling.greedy)
    assert logits.tolist() == [9.0, 8.0, 7.0, 1.0, 0.0]


def test_a_constraint_that_fails_is_its_own_rows_error():
    class Broken(Only):
        def mask(self, scores):
            raise RuntimeError("lost the thread")

    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    samplers = [Sampler(Sampling(), 0, Broken()), Sampler(Sampling(), 0, Only()), Sampler(Sampling())]
    broken, empty, fine = sample_tokens(logits, samplers, [[]] * 3)
    assert isinstance(broken, ConstraintError) and "lost the thread" in str(broken)
    assert isinstance(empty, ConstraintError) and "no token" in str(empty)
    assert fine == 2


@pytest.mark.parametrize(("settings", "name"), [
    ({"logit_bias": {1: 2}}, "logit_bias"), ({"logit_bias": ((1, 101),)}, "logit_bias"),
    ({"logit_bias": ((1, float("nan")),)}, "logit_bias"), ({"logit_bias": ((-1, 1),)}, "logit_bias"),
    ({"logit_bias": ((1, 1), (1, 2))}, "logit_bias"), ({"logit_bias": ((1,),)}, "logit_bias"),
    ({"logit_bias": (([], 1),)}, "logit_bias"), ({"logit_bias": ((1, True),)}, "logit_bias"),
    ({"logit_bias": tuple((i, 1) for i in range(301))}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"presence_penalty": float("inf")}, "presence_penalty")])
def test_biases_and_penalties_out_of_range(settings, name):
    with pytest.raises(UsageError, match=name):
        Sampling(**settings)


def test_without_a_constraint_nothing_is_done_on_the_host():
    Sampling(logit_bias=tuple((i, 100) for i in range(300)))
    assert not Sampler(Sampling(temperature=1, top_k=5)).changes
    for settings in ({"logit_bias": ((1, 1),)}, {"presence_penalty": 1}, {"frequency_penalty": -1}):
        sampler = Sampler(Sampling(**settings))
        assert sampler.changes and not sampler.on_host


# -- stop strings in pieces of any size

def feed(pieces, stops):
    decoder = StopStrings(stops)
    shown = [decoder.push(piece) for piece in pieces]
    return "".join([*shown, decoder.finish()]), decoder.stop


def test_text_is_held_only_while_it_could_become_a_stop_string():
    decoder = StopStrings(("\n\n", "END"))
    assert decoder.push("one\n") == "one"
    assert decoder.push("two E") == "\ntwo "
    assert decoder.push("N") == ""
    assert decoder.push("X") == "ENX"
    assert decoder.push("EEN") == "E"
    assert decoder.push("D after") == ""
    assert decoder.stop == "END"
    assert decoder.push("more") == "" and decoder.finish() == ""


def oracle(text, stops):
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end - len(longest)], longest
    return text, None


@given(st.text("ab\n", max_size=24), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3,
                                              unique=True),
       st.data())
def test_equals_looking_at_one_character_after_another(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert feed(pieces, stops) == oracle(text, stops)
