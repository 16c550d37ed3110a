"""A plan holds every sequence once, and computes a token only where its prefix isn't there yet."""

from hypothesis import given
from hypothesis import strategies as st

from quantkit.evaluation.tasks.prefix_plan import MIN_INHERITED, plan_prefixes

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), max_size=25)


def prefixes(sequences):
    return {ids[:end] for ids in sequences for end in range(1, len(ids) + 1)}


@given(TEXTS, st.integers(1, 6), st.integers(1, 40), st.integers(1, 5))
def test_every_token_has_its_prefix(sequences, runs, step, least):
    plan = plan_prefixes(sequences, runs, step, least)
    assert plan.sequences == sorted(set(sequences)) and len(plan.runs) <= runs
    assert [number for run in plan.runs for number in range(run.first, run.end)] == [
        *range(len(plan.sequences))]
    for before, run in zip([None, *plan.runs], plan.runs):
        assert run.first < run.end and plan.shared[run.first] == run.inherited
        if run.inherited:
            assert run.inherited >= least
            assert (plan.sequences[before.first][:run.inherited]
                    == plan.sequences[run.first][:run.inherited])
        for number in range(run.first + 1, run.end):
            shared = plan.shared[number]
            assert plan.sequences[number - 1][:shared] == plan.sequences[number][:shared]
    for number, shared in enumerate(plan.shared):
        assert 0 <= shared < len(plan.sequences[number]), "each has a token of its own"


@given(TEXTS, st.integers(1, 6), st.integers(1, 5))
def test_who_computes_a_token(sequences, runs, least):
    plan = plan_prefixes(sequences, runs, 40, least)
    for number, computed_by in enumerate(plan.computed_by()):
        ids = plan.sequences[number]
        for place in range(len(ids)):
            owner = computed_by[place]
            assert owner <= number and plan.sequences[owner][:place + 1] == ids[:place + 1]
            assert place >= plan.shared[owner]


@given(TEXTS)
def test_one_run_computes_every_prefix_once(sequences):
    assert plan_prefixes(sequences, 1, 512).tokens == len(prefixes(sequences))


def test_runs_begin_where_little_is_shared():
    questions = [(subject, *range(50), number, answer)
                 for subject in range(4) for number in range(100, 105) for answer in range(200, 204)]
    plan = plan_prefixes(questions, 4, 512)
    assert [run.first for run in plan.runs] == [0, 20, 40, 60]
    assert plan.tokens == len(prefixes(questions))


def test_runs_of_the_same_examples_take_them_over():
    questions = [(*range(300), number, 1, 2, 3) for number in range(400, 440)]
    plan = plan_prefixes(questions, 8, 512)
    assert len(plan.runs) > 1 and {run.inherited for run in plan.runs[1:]} == {300}
    assert plan.tokens == len(prefixes(questions))
    short = plan_prefixes([ids[300 - MIN_INHERITED + 1:] for ids in questions], 8, 512)
    assert len(short.runs) > 1 and not any(run.inherited for run in short.runs)


def test_no_more_runs_than_fill_a_step():
    long = [(number, *range(1000)) for number in range(40)]
    assert len(plan_prefixes(long, 40, 512).runs) == 1
    assert plan_prefixes([], 4, 512).runs == []
