"""Lark grammars as regular expressions."""

import json
import re
import warnings

import pytest

from quantkit.structure.lark_regex import NotRegularError, regular_expression

PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk  // of a file that is there
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


@pytest.mark.parametrize(("grammar", "good", "bad"), [
    (PATCH, ["*** Begin Patch\n*** Update File: a\n@@ f\n-x\n+y\n*** End Patch",
             "*** Begin Patch\n*** Delete File: a\n*** Add File: b\n+\n*** End Patch\n"],
     ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Update: a\n*** End Patch", ""]),
    ('start: "a"~2..3 B? [c]\nB.2: "b"i\n?c: "x".."z"', ["aa", "aaaBy", "aabz"], ["a", "aac", "aaxx"]),
    ("start: A{2} | _x*\nA: /[ab]\\//i\n_x: \"[.\"", ["a/B/", "", "[.[."], ["[a", "a/"]),
    ("start: WS_INLINE n\n%import common.SIGNED_INT -> n\n%import common (WS_INLINE, LF)", [" -12"], ["1"]),
    ('start: "\\u00e9\\n\\"#"', ['é\n"#'], ["e"]),
])
def test_what_it_matches(grammar, good, bad):
    regex = regular_expression(grammar, 8192)
    assert all(re.fullmatch(regex, text) for text in good)
    assert not any(re.fullmatch(regex, text) for text in bad)


@pytest.mark.parametrize(("grammar", "said"), [
    ('start: "(" start ")" | "x"', "refers to itself"), ("start: a", "no rule a"), ("", "begin with a rule"),
    ("start: /x/\n%ignore WS", "%ignore"), ("%import common.FOO\nstart: FOO", "common.FOO"),
    ('start: ("a"', "isn't closed"), ('start: "a" )', "isn't expected"), ("start: @x", "can't be read"),
    ('start: "ab".."c"', "range"), ("start: " + "(" * 5000, "too deep"), ('start: "\\x"', "is no text"),
    ("\n".join(['start: r0', *(f"r{i}: r{i + 1}" for i in range(5000)), 'r5000: "x"']), "too deep"),
    ("\n".join(['start: r0 r0', *(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)), 'r20: "x"']), "more than"),
])
def test_what_is_no_regular_expression(grammar, said):
    with pytest.raises(NotRegularError, match=said):
        regular_expression(grammar, 8192)


def test_llguidance_keeps_it_in_a_string():
    llguidance = pytest.importorskip("llguidance", reason="needs quantkit[structure]")
    pattern = f"^(?:{regular_expression(PATCH, 8192)})$"
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": pattern}},
              "required": ["input"], "additionalProperties": False}
    tokenizer = llguidance.LLTokenizer("byte")
    for text, fits in (('*** Begin Patch\n*** Add File: "a\\b"\n+\tx\n*** End Patch', True),
                       ("*** Begin Patch\nx", False)):
        matcher = llguidance.LLMatcher(tokenizer, "start: %json " + json.dumps(schema) + "\n")
        written = tokenizer.tokenize_bytes(json.dumps({"input": text}, separators=(",", ":")).encode())
        assert (matcher.validate_tokens(written) == len(written)) == fits, text


def test_escapes_that_python_doesnt_know_print_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert regular_expression(r'start: "\d\n\\."', 100) == r"\\d\n\\\."
