"""Stop strings in pieces of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.runtime.stop import StopStrings


def feed(pieces, stops):
    decoder = StopStrings(stops)
    shown = [decoder.push(piece) for piece in pieces]
    return "".join([*shown, decoder.finish()]), decoder.found


def test_text_is_held_only_while_it_could_become_a_stop_string():
    decoder = StopStrings(("\n\n", "END"))
    assert decoder.push("one\n") == "one"
    assert decoder.push("two E") == "\ntwo "
    assert decoder.push("N") == ""
    assert decoder.push("X") == "ENX"
    assert decoder.push("EEN") == "E"
    assert decoder.push("D after") == ""
    assert decoder.found == "END"
    assert decoder.push("more") == "" and decoder.finish() == ""


def test_what_was_held_comes_out_at_the_end():
    assert feed(["a", "EN"], ("END",)) == ("aEN", None)


def test_no_stop_strings_hold_nothing():
    assert StopStrings(()).push("abc") == "abc"


@pytest.mark.parametrize(("stops", "expected", "found"), [
    (("b", "abc"), "xa", "b"),  # b is complete before abc is
    (("abc", "bc"), "x", "abc"),  # both end together: the longer one
    (("cd", "xabcd"), "", "xabcd"), (("zz",), "xabcd", None)])
def test_which_of_several_counts_doesnt_depend_on_the_pieces(stops, expected, found):
    text = "xabcd"
    for size in range(1, 6):
        pieces = [text[i:i + size] for i in range(0, 5, size)]
        assert feed(pieces, stops) == (expected, found), size


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
