"""Hay: exactly so many tokens, whole sentences, the same for the same seed."""

import random

import pytest

from quantkit.evaluation.long.haystack import LONGEST, FillerHaystack, TextHaystack, fill_haystack
from quantkit.support.errors import UsageError

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
