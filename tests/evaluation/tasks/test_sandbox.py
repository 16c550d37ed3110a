"""Templates give what lm-eval's would, and can do no harm."""


import time

import pytest

from quantkit.evaluation.tasks import sandbox as task_regex
from quantkit.evaluation.tasks.sandbox import BoundedPattern, TaskTemplate, regex_filter, remove_all
from quantkit.support.errors import UsageError

ROW = {"query": "What?", "endings": ["a [title] b", "[step] c  d"], "n": 3, "long": "x" * 2000}


def value(text, row=ROW):
    return TaskTemplate(text, "t.yaml: doc_to_text").value(row, "rows.jsonl line 1")


@pytest.mark.parametrize(("text", "expected"), [
    ("query", "What?"), ("n", 3), ("plain text", "plain text"), ("", ""),
    ("{{query}}\nAnswer:\n\n", "What?\nAnswer:\n\n"),
    ("{% if n > 2 %}\n  many{% endif %}\n", "\n  many\n"),
    ("{{query.strip() | replace('?', '!')}}", "What!"),
    ("{{query.split('a')[:-1] | join(' ')}}", "Wh"),
    (r"{{'a [b] c' | regex_replace('\\[.*?\\] ', '')}}", "a c"),
    ("{{endings | length}}", "2")])
def test_values(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize("text", [
    "{{query}}\nAnswer:", "{{query.upper()}}\n", " {% if n %}\n x {% endif %}\n\n",
    r"{{endings | map('replace', ' [title]', '. ') | map('regex_replace', '\\[.*?\\]', '') | list}}"])
def test_as_lm_eval_renders_them(text):
    utils = pytest.importorskip("lm_eval.utils")
    assert value(text) == utils.apply_template(text, ROW)


def test_lists():
    def items(text, row=ROW):
        return TaskTemplate(text, "t").items(row, "line 1")

    assert items("endings") == ROW["endings"]
    assert items("{{endings | map('upper') | list}}") == ["A [TITLE] B", "[STEP] C  D"]
    assert items("{{[query, 'it\\'s \"so\"']}}") == ["What?", "it's \"so\""]
    for text in ("query", "{{n}}", "{{{'a': 1}}}", "[open(", "[" * 500, "__import__('os')"):
        assert items(text) is None


@pytest.mark.parametrize("text", [
    "{{missing}}", "{{query.__class__}}", "{{query.__class__.__mro__[1].__subclasses__()}}",
    "{{''.format(query)}}", "{{cycler.__init__.__globals__.os.popen('id').read()}}", "{{lipsum}}",
    "{{self.__init__.__globals__}}", "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}"
    "{% endfor %}", "{{'x' * 999999999}}", "{{long | regex_replace('x', long ~ long ~ long)}}",
    "{{query | regex_replace('(', '')}}", "{{n / 0}}", "{{query.n.m}}"])
def test_what_may_not_be(text):
    begin = time.monotonic()
    with pytest.raises(UsageError) as caught:
        value(text)
    assert "t.yaml: doc_to_text" in caught.value.what and "rows.jsonl line 1" in caught.value.what
    assert time.monotonic() - begin < 10  # the sandbox's own limit is two seconds


@pytest.mark.parametrize("text", ["{{", "{% for %}", "{{ x | nosuchfilter }}", "{% include 'x' %}"])
def test_not_a_template(text):
    with pytest.raises(UsageError, match=r"t\.yaml: doc_to_text"):
        value(text)


def test_rows_cannot_shadow_the_sandbox():
    for name in ("self", "context", "environment", "range"):
        try:
            assert value("{{query}}", {**ROW, name: "mine"}) == "What?"
        except UsageError as error:
            assert "rows.jsonl line 1" in error.what


def test_one_row_does_not_eat_the_next_ones_budget():
    template = TaskTemplate("{% for a in range(900) %}{{long}}{% endfor %}", "t")
    for _ in range(40):
        assert len(template.value(ROW, "line")) == 1_800_000


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
