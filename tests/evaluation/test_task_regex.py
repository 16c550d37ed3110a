"""Expressions of task files find what lm-eval's would, and end in time."""

import time

import pytest

from quantkit.evaluation.tasks import sandbox as task_regex
from quantkit.evaluation.tasks.sandbox import BoundedPattern, TaskTemplate, regex_filter, remove_all
from quantkit.support.errors import UsageError

HANGS, TEXT = "(a+)+$", "a" * 60 + "!"
ANSWERS = [["so #### 1,234."], ["#### 5 #### 6"], ["none"], [""]]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(task_regex, "SECONDS", 1.0)


@pytest.mark.parametrize("options", [
    {"regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"regex_pattern": r"(\d)|(#)", "group_select": -1},
    {"regex_pattern": r"\d+", "fallback": "nothing"}, {"regex_pattern": r"(x)?"}, {}])
def test_as_lm_eval_filters(options):
    theirs = pytest.importorskip("lm_eval.filters.extraction").RegexFilter
    assert regex_filter()(**options).apply(ANSWERS, [{}] * 4) == theirs(**options).apply(ANSWERS, [{}] * 4)


def test_a_match_that_is_not_there():
    pytest.importorskip("lm_eval")
    with pytest.raises(UsageError, match="no match 3"):
        regex_filter()(regex_pattern=r"\d", group_select=3).apply([["1 2"]], [{}])


def test_a_search_that_backtracks_is_ended(soon):
    pytest.importorskip("lm_eval")
    begin = time.monotonic()
    for search in (lambda: BoundedPattern(HANGS).findall(TEXT), lambda: remove_all([",", HANGS], TEXT),
                   lambda: regex_filter()(regex_pattern=HANGS).apply([[TEXT]], [{}])):
        with pytest.raises(UsageError, match="can't be searched for in an answer") as caught:
            search()
        assert "more than 1 s" in caught.value.why and "nested" in caught.value.next
    assert time.monotonic() - begin < 30


def test_a_template_that_backtracks_is_ended():
    template = TaskTemplate("{{ text | regex_replace('(a+)+$', '') }}", "t.yaml: doc_to_text")
    begin = time.monotonic()
    with pytest.raises(UsageError, match="can't be filled in from line 1") as caught:
        template.value({"text": TEXT}, "line 1")
    assert "it takes more than" in caught.value.why and time.monotonic() - begin < 20


def test_what_is_removed():
    assert remove_all([], "a,b") == "a,b"
    assert remove_all([",", "\\$", "(?s).*#### ", "\\.$"], "so\n#### $1,234.") == "1234"
    with pytest.raises(UsageError, match="can't be used"):
        remove_all(["("], "a")
