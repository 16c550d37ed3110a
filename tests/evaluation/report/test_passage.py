"""A text by token: what is shown of each."""

import math

from quantkit.evaluation.report.page.passage import largest, shaded, summary, visible
from quantkit.evaluation.result import TokenDiff


def diff(tokens, kl, expected):
    return TokenDiff(text="code", reference="bf16", candidate="int4", tokens=tuple(tokens), kl=tuple(kl),
                     loss=(0.5,) * len(tokens), expected=tuple(expected))


def test_shades_grow_with_kl_and_notes_say_what_was_expected():
    text = shaded(diff(["a", " b", "c", "d"], [0.0, 0.01, 0.29, 7.0], [None, None, None, ("x\n", " y")]))
    assert [token.level for token in text.tokens] == [0, 1, 3, 5]
    assert [token.differs for token in text.tokens] == [False, False, False, True]
    assert text.tokens[3].note == ("“d”: KL 7.00, loss 0.500 nats above the reference's; the reference "
                                   "expects "
                                   "“x⏎”, the variant “ y”")


def test_white_space_can_be_seen_and_keeps_its_effect():
    assert visible("\n\n") == "⏎\n⏎\n" and visible("\tx ") == "⇥\tx "
    assert visible("\x1b[2J\x00") == "␛[2J␀" and visible("\u202e") == "\ufffd"


def test_the_summary_counts(rich):
    sentences = summary(rich.diff)
    differs = sum(expected is not None for expected in rich.diff.expected)
    assert f"At {differs} of {len(rich.diff.tokens)} tokens" in sentences[0] and len(sentences) == 1
    long = diff(["a"] * 4000, [0.0] * 4000, [None] * 4000)
    assert "first 3,000" in summary(long)[1] and len(shaded(long).tokens) == 3000


def test_the_largest_differences_stand_in_a_table():
    table = largest(diff(["Light", " is", " blue", "."], [0.0, 2.0, math.inf, 0.5],
                         [None, ("a", "b"), ("c", "d"), ("e", "f")]))
    assert [row[1] for row in table.rows] == ["“ is”", "“.”"], "what is not finite has no rank"
    assert table.rows[1] == ("“Light is blue”", "“.”", "“e”", "“f”", "0.500")
    assert largest(diff(["a"], [1.0], [None])) is None
