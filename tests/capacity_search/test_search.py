"""Which combination is chosen, and what fits, against a search over everything."""

from __future__ import annotations

import itertools

import pytest

from quantkit.capacity_search.search import candidates, combine, pareto_front
from quantkit.kv.spec import parse_kv
from quantkit.quantization.recipe import list_recipes
from quantkit.runtime.memory.serving import Requirements
from quantkit.support.errors import RecipeError, UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def big():
    """All there is to choose from for a synthetic 8B."""
    return candidates("synthetic:llama-8b").pairs


def test_every_recipe_and_every_measured_codec_is_there(big):
    names = {one.name for one, _ in big}
    unfit = {"mixed", "mixed-trellis", "mlx-4bit-tied"}  # need a budget, or an embedding that is the head
    assert names == {info.name for info in list_recipes()} - unfit | {"none"}
    settings = {str(kv) for one, kv in big if one.name == "int4"}
    assert settings == {"none", "int8", "fp8", "int4", "int3", "int2", "rotation(4)", "rotation(3.5)",
                        "rotation(3)", "rotation(2.5)", "rotation(2)"}
    assert {str(kv) for one, kv in big if one.name == "int8-kv8"} == {"int8"}, "the recipe says so"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory", [5, 6, 8, 10, 12, 15, 18, 20, 25])
def test_the_least_expected_loss_of_what_fits_is_chosen(big, memory):
    found = combine(big, Requirements(8192, 4, memory * 10**9))
    fitting = [one for one in found if one.total <= memory * 10**9]
    assert [one.left >= 0 for one in found] == [one in fitting for one in found]
    known = [choice for choice in fitting if choice.kl is not None]
    if not known:
        assert memory == 5
        return
    assert found.index(fitting[0]) == min(map(found.index, fitting))
    assert fitting[0].kl == min(one.kl for one in known)


def test_more_memory_never_costs_quality(big):
    best = [next(one.kl for one in combine(big, Requirements(4096, 4, size * 10**9)) if one.left >= 0)
            for size in (6, 7, 9, 11, 14, 20, 40)]
    assert best == sorted(best, reverse=True) and best[-1] == 0


def test_the_sum_is_of_its_parts(big):
    for one in combine(big, Requirements(2048, 3, 10**10))[::17]:
        said = one.to_dict()
        assert said["total_bytes"] == said["weight_bytes"] + said["kv_bytes"] + said["kv_spare_bytes"] + sum(
            said["other_bytes"].values())
        assert said["left_bytes"] == 10**10 - said["total_bytes"]
        assert said["fits"] == (said["left_bytes"] >= 0)
        assert said["kv_spare_bytes"] >= one.footprint.moving_bytes(3) > 0


def test_what_was_never_measured_comes_last(big):
    ranked = combine(big, Requirements(2048, 1, 10**11))
    unknown = [one.kl is None for one in ranked]
    assert unknown == sorted(unknown) and any(unknown)
    pairs = candidates("synthetic:llama-8b", settings=[parse_kv("window(512)")], recipes=["int8"]).pairs
    (windowed,) = combine(pairs, Requirements(2048, 1, 10**11))
    assert windowed.kl is None and windowed.weights_kl is not None


@pytest.mark.parametrize("kv", ["none", "int4", "window(200)"])
def test_room_is_all_there_is(tiny, kv):
    pairs = candidates(str(tiny), settings=[parse_kv(kv)], recipes=["int8"]).pairs
    (one,) = combine(pairs, Requirements(300, 7, 512 * 10**6))
    sequences, longest = one.most_sequences(), one.most_context()
    assert one.at(concurrency=sequences).left >= 0 > one.at(concurrency=sequences + 1).left
    assert longest == 512, "the model's own limit"
    (tight,) = combine(pairs, Requirements(300, 7, one.total + 1000))
    assert 300 <= tight.most_context() < 512
    assert tight.at(context=tight.most_context()).left >= 0 > tight.at(context=tight.most_context() + 1).left
    (none,) = combine(pairs, Requirements(300, 7, 10**6))
    assert none.most_sequences() == none.most_context() == 0


def test_the_front_needs_less_for_every_loss_more(big):
    ranked = combine(big, Requirements(8192, 4, 10**10))
    front = pareto_front(ranked)
    assert front[0] is ranked[0]
    for one, other in itertools.pairwise(front):
        assert one.rank < other.rank and one.total > other.total
    for one in ranked:
        assert any(other.rank <= one.rank and other.total <= one.total for other in front)


def test_a_checkpoint_leaves_only_the_cache_to_choose(checkpoint):
    there = candidates(str(checkpoint))
    assert {one.name for one, _ in there.pairs} == {"int8"} and len(there.pairs) == 11
    assert all(one.recipe is None for one, _ in there.pairs)
    with pytest.raises(UsageError, match="is quantized already"):
        candidates(str(checkpoint), recipes=["int4"])


def test_what_does_not_fit_the_model_is_left_out_with_its_reason(tmp_path):
    small = str(tiny_model(tmp_path / "llama"))  # heads of 16, which codecs below 8 bits don't take
    there = candidates(small)
    assert {str(kv) for _, kv in there.pairs} == {"none", "int8", "fp8"}
    assert "16" in there.left_out["int4"]
    with pytest.raises(UsageError, match="head dimension"):
        combine(candidates(small, settings=[parse_kv("int4")], recipes=["int8"]).pairs,
                Requirements(100, 1, 10**9))


def test_what_is_named_must_exist_and_say_what_it_makes(tiny):
    with pytest.raises(RecipeError, match="no recipe"):
        candidates(str(tiny), recipes=["int5"])
    with pytest.raises(UsageError, match="leaves a choice"):
        candidates(str(tiny), recipes=["mixed"])
    with pytest.raises(UsageError, match="no KV policy or codec"):
        candidates(str(tiny), settings=[parse_kv("int9")])
    with pytest.raises(UsageError, match="the model was made for 512"):
        combine(candidates(str(tiny), recipes=["none"]).pairs, Requirements(513, 1, 10**9))


def test_half_of_a_sequence_is_its_prompt_unless_said():
    assert Requirements(100, 1, 1).prompt_tokens == 50 and Requirements(1, 1, 1).prompt_tokens == 1
    assert Requirements(100, 1, 1, 70).prompt_tokens == 70 and Requirements(60, 1, 1, 70).prompt_tokens == 60
