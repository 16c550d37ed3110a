"""Prompts: as long as they should be, the answer in them once, where it should be, among others."""


import random
import re

import pytest

from quantkit.evaluation.long.haystack import LONGEST, FillerHaystack, TextHaystack, fill_haystack
from quantkit.evaluation.long.items import depths_of, make_items
from quantkit.evaluation.long.tasks import CHAINS, HOPS, KEYS, TASKS
from quantkit.support.errors import SourceError, UsageError

LENGTHS = {"passkey": 400, "needle": 400, "multikey": 900, "variables": 900}


def items(loaded, task, depths=3, samples=2, seed=5, **options):
    return make_items(loaded.tokenizer, task, FillerHaystack(), length=LENGTHS[task], depths=depths,
                      samples=samples, seed=seed, **options)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_with_its_longest_question_and_answer_has_the_length(loaded, task, chat):
    for item in items(loaded, task, chat=chat):
        tails = [len(one.ids) + len(one.answer) for one in item.questions]
        assert len(item.context) + max(tails) == item.length == LENGTHS[task]
        assert all(one.answer and one.ids for one in item.questions)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_and_another_something_else(loaded, task):
    assert items(loaded, task) == items(loaded, task)
    one, other = items(loaded, task), items(loaded, task, seed=6)
    assert not {item.context for item in one} & {item.context for item in other}
    assert len({item.context for item in one}) == len(one), "samples and depths differ"


@pytest.mark.parametrize(("task", "times"), [("passkey", 2), ("needle", 1), ("multikey", 1)])
def test_the_answer_stands_in_the_context_at_its_depth(loaded, task, times):
    for item in items(loaded, task, depths=5):
        text = loaded.tokenizer.decode(item.context)
        for question in item.questions:
            found = [match.start() for match in re.finditer(rf"\b{question.text}\b", text)]
            assert len(found) == times
            # of the characters nearly, and only the tokens' share is exact
            assert abs(found[0] / len(text) - question.depth) < 0.2, (question, found[0] / len(text))


def test_a_question_s_lead_is_followed_by_the_answer_in_the_context(loaded):
    for task in ("passkey", "needle", "multikey"):
        for item in items(loaded, task):
            text = loaded.tokenizer.decode(item.context)
            for question in item.questions:
                lead = loaded.tokenizer.decode(question.ids).strip()
                assert f"{lead} {question.text}" in text
                assert loaded.tokenizer.decode(question.ids + question.answer).endswith(f" {question.text}")


def test_single_needles_have_a_context_each_and_many_share_one(loaded):
    assert [[one.depth for one in item.questions] for item in items(loaded, "needle", samples=1)] == [
        [0.0], [0.5], [1.0]]
    (item,) = items(loaded, "multikey", samples=1)
    assert [one.depth for one in item.questions] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("depths", [1, 6])
def test_distractors_have_other_keys_and_other_answers(loaded, depths):
    for item in items(loaded, "multikey", depths=depths):
        found = re.findall(r"access code for (\w+) is (\d+)\.", loaded.tokenizer.decode(item.context))
        assert len(found) == len(dict(found)) == len(set(dict(found).values())) == max(KEYS, depths)
        assert len(item.questions) == depths
        for question in item.questions:
            (key,) = re.findall(r"code for (\w+) is$", loaded.tokenizer.decode(question.ids))
            assert dict(found)[key] == question.text


def test_a_variable_s_value_is_reached_through_as_many_others_as_it_says(loaded):
    for item in items(loaded, "variables"):
        text = loaded.tokenizer.decode(item.context)
        given = {key: (at, code) for at, key, code in _found(text, r"access code for (\w+) is (\d+)\.")}
        passed = {key: (at, source)
                  for at, key, source in _found(text, r"(\w+) has the same access code as (\w+)\.")}
        assert len(given) == CHAINS and len(passed) == CHAINS * HOPS
        assert sorted(one.hops for one in item.questions) == sorted(list(range(HOPS + 1)) * CHAINS)
        for question in item.questions:
            (name,) = re.findall(r"code for (\w+) is$", loaded.tokenizer.decode(question.ids))
            hops = 0
            while name in passed:
                at, source = passed[name]
                assert at > (passed.get(source) or given[source])[0], "it was told before it was passed on"
                name, hops = source, hops + 1
            assert (hops, given[name][1]) == (question.hops, question.text)


def _found(text, pattern):
    return [(match.start(), *match.groups()) for match in re.finditer(pattern, text)]


def test_depths_go_from_the_beginning_to_the_end():
    assert depths_of(1) == (0.5,) and depths_of(2) == (0.0, 1.0)
    assert depths_of(5) == (0.0, 0.25, 0.5, 0.75, 1.0)


def test_a_length_that_is_too_short_is_refused_with_one_that_is_not(loaded):
    with pytest.raises(UsageError, match="too few for variables") as error:
        make_items(loaded.tokenizer, "variables", FillerHaystack(), length=100, depths=3, samples=1)
    length = int(error.value.next.split()[-1])
    assert make_items(loaded.tokenizer, "variables", FillerHaystack(), length=length, depths=3, samples=1)


def test_too_many_keys_are_refused():
    with pytest.raises(UsageError, match="depths for multikey"):
        list(TASKS["multikey"].drafts(depths_of(100), random.Random(0)))


def test_a_text_is_continued_within_the_user_s_turn_or_answered_after_it(loaded):
    (plain,), (chat,) = (items(loaded, "multikey", samples=1, chat=chat) for chat in (False, True))
    first, second = (loaded.tokenizer.decode([*item.context, *item.questions[0].ids], skip_special=False)
                     for item in (plain, chat))
    assert first.count("<|im_start|>") == 1 and "<|im_end|>" not in first
    assert second.count("<|im_start|>") == 2
    assert re.search(r"\?<\|im_end\|>\n<\|im_start\|>assistant\nThe", second)


def test_a_base_model_is_not_asked_by_a_template(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "_template", None)
    assert items(loaded, "passkey")[0].length == LENGTHS["passkey"]
    with pytest.raises(SourceError, match="no chat template"):
        items(loaded, "passkey", chat=True)


STORY = " ".join(f"This is sentence number {index}, no more and no less." for index in range(400))


@pytest.mark.parametrize("hay", [TextHaystack("story", STORY), FillerHaystack()], ids=lambda hay: hay.name)
@pytest.mark.parametrize("tokens", [1, 2, 57, 400])
def test_it_has_the_tokens_that_were_asked_for_and_knows_where_sentences_begin(loaded, hay, tokens):
    found = fill_haystack(hay, loaded.tokenizer, tokens, random.Random(3))
    assert len(found.ids) == tokens and found.starts[0] == 0
    assert found == fill_haystack(hay, loaded.tokenizer, tokens, random.Random(3))
    for start, end in zip(found.starts, found.starts[1:]):
        text = loaded.tokenizer.decode(found.ids[start:end])
        assert text.startswith(" ") and text.endswith(".") and text.count(".") == 1


def test_a_text_begins_somewhere_and_goes_on_in_order(loaded):
    begun = set()
    for seed in range(8):
        found = fill_haystack(TextHaystack("story", STORY), loaded.tokenizer, 300, random.Random(seed))
        numbers = [int(word.strip(",")) for word in loaded.tokenizer.decode(found.ids).split()
                   if word.strip(",").isdigit()]
        # the last sentence may be cut, and its number with it
        assert numbers[:-1] == list(range(numbers[0], numbers[0] + len(numbers) - 1))
        begun.add(numbers[0])
    assert len(begun) > 4


def test_a_text_that_is_too_short_is_refused(loaded):
    with pytest.raises(UsageError, match="100000 are needed"):
        fill_haystack(TextHaystack("story", STORY), loaded.tokenizer, 100_000, random.Random(0))


def test_white_space_and_quotation_marks_don_t_hide_where_sentences_end(loaded):
    hay = TextHaystack("talk", "“Come in!” she said.\n\nHe came.   “Where\nis it?” Nobody knew.")
    assert list(hay.sentences(random.Random(0), 10)) == [
        "“Come in!”", "she said.", "He came.", "“Where is it?”", "Nobody knew."]


def test_titles_and_initials_end_no_sentence(loaded):
    hay = TextHaystack("talk", "Mr. Bennet met J. Smith (a Dr. St. John had sent him). So did I. She left.")
    assert list(hay.sentences(random.Random(0), 10)) == [
        "Mr. Bennet met J. Smith (a Dr. St. John had sent him).", "So did I.", "She left."]


def test_a_text_without_ends_of_sentences_is_cut_between_words(loaded):
    words = " ".join(f"word{index}" for index in range(500))
    pieces = list(TextHaystack("list", words).sentences(random.Random(0), 1000))
    assert " ".join(pieces) == words and max(map(len, pieces)) <= LONGEST
    assert max(map(len, TextHaystack("no spaces", "x" * 2000).sentences(random.Random(0), 100))) == LONGEST
    # another script's stops need no space behind them
    assert list(TextHaystack("zh", "你好。他说：「来吧！？」她来了。").sentences(random.Random(0), 10)) == [
        "你好。", "他说：「来吧！？」", "她来了。"]


def test_a_book_is_hay(loaded, shared_data):
    book = shared_data / "longctx" / "war_and_peace.txt"
    if not book.is_file():
        pytest.skip(f"needs a long real text, which is no part of the project: {book} isn't there")
    hay = TextHaystack(book.name, book.read_text(encoding="utf-8"))
    found = fill_haystack(hay, loaded.tokenizer, 8000, random.Random(1))
    assert len(found.ids) == 8000 and 100 < len(found.starts) < 2000
