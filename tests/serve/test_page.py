"""The page is one file that loads nothing and can run nothing but itself."""

import re

import pytest

from quantkit.serve.page.document import page


@pytest.fixture(scope="module")
def html():
    return page()[0]


def test_it_is_served_under_its_policy(shared, html):
    with shared.http as client:
        answer = client.get("/")
    assert answer.text == html and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == page()[1]
    assert answer.headers["x-frame-options"] == "DENY"


def test_the_policy_allows_its_own_script_and_style_and_requests_to_this_server():
    rules = dict(rule.split(" ", 1) for rule in page()[1].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["style-src"])
    assert "unsafe" not in page()[1]


def test_nothing_comes_from_elsewhere(html):
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, not an address"
    assert not re.search(r"<(?:iframe|object|embed|base)\b|@import|url\(|<script [^>]", html)
    assert re.findall(r'<link rel="(\w+)" href="data:', html) == ["icon"] and html.count("<link") == 1


def test_a_models_words_are_never_markup(html):
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    code = re.sub(r"//.*", "", script)
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
                   "setAttribute(\"on", "srcdoc", "DOMParser", "createContextualFragment"):
        assert banned not in code
    assert not re.search(r"\son\w+=", html), "the policy would block handlers in attributes"
    assert not re.search(r"\sstyle=", html)


def test_every_element_that_the_script_looks_up_is_there(html):
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', html)) <= ids
    labelled = re.findall(r"<(?:input|textarea)\b[^>]*>", html)
    assert len(labelled) == 4 and html.count("<label") == 3 and 'aria-label="Message"' in html
