"""What the report says, and from where on it warns."""

import pytest

from quantkit.checkpoint.manifest import Coverage, Overlap

FINE = Coverage(documents=1, available=2000, used=1024, distinct=300, vocabulary=1000, widest=512)


def changed(**fields) -> Coverage:
    return FINE.model_copy(update=fields)


def test_nothing_to_warn_of():
    assert FINE.warnings(64) == []
    assert FINE.lines() == ["1,024 of 2,000 tokens, from 1 document",
                            "300 different tokens, 30.0% of the vocabulary",
                            "0 windows equal an earlier one, 0 repeat earlier ones by half"]


@pytest.mark.parametrize(("fields", "said"), [
    ({"widest": 1025}, ["1,024", "1,025 inputs", "no full rank", "--windows 17 "]),
    ({"distinct": 9}, ["9 different tokens", "0.90%"]),
    ({"same": 1}, ["1 are equal"]), ({"similar": 2}, ["2 repeat"]),
    ({"cut": 3, "lost": 1025}, ["1,025 tokens were cut off", "--window"]),
    ({"overlaps": (Overlap(text="exam.txt", windows=2, largest=0.55),)}, ["2 calibration windows", "55%",
                                                                         "exam.txt"])])
def test_each_warning_gives_its_numbers(fields, said):
    (warning,) = changed(**fields).warnings(64)
    assert all(words in warning for words in said), warning


@pytest.mark.parametrize("fields", [
    {"widest": 1024}, {"distinct": 10}, {"cut": 3, "lost": 1024}, {"short": 5}, {"left_out": 1},
    {"avoided": 1},
    {"overlaps": (Overlap(text="exam.txt", windows=0, largest=0.19),)}])
def test_what_is_reported_only(fields):
    assert changed(**fields).warnings(64) == []


def test_every_number_is_in_the_report():
    shared = (Overlap(text="exam.txt", windows=1, largest=0.5),)
    report = changed(documents=7, chats=6, short=5, cut=4, lost=33, left_out=2, avoided=8, same=9, similar=3,
                     overlaps=shared)
    for words in ("from 7 documents (6 conversations)", "5 documents shorter", "4 documents cut", "33 tokens",
                  "2 conversations left out", "8 left out", "9 windows equal", "3 repeat", "50.0%", "exam"):
        assert words in "\n".join(report.lines())
