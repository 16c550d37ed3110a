"""The page is one document that loads nothing and can run nothing but itself."""

import re
from pathlib import Path

import pytest

import quantkit.serving.page
from quantkit.serving.page import page

FOLDER = Path(quantkit.serving.page.__file__).parent


@pytest.fixture(scope="module")
def html():
    return page()[0]


def test_it_is_served_under_its_policy(shared, html):
    answer = shared.get("/")
    assert answer.text == html and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == page()[1]
    assert answer.headers["x-frame-options"] == "DENY"


def test_the_policy_allows_its_own_scripts_and_styles_and_requests_to_this_server(html):
    rules = dict(rule.split(" ", 1) for rule in page()[1].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        hashes = rules[rule].split()
        assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", value) for value in hashes)
        assert len(hashes) == html.count(f"<{tag}>") > 2
    assert "unsafe" not in page()[1]


def test_every_file_of_the_folder_is_a_part_of_the_document(html):
    files = [file for file in FOLDER.iterdir() if file.suffix in (".css", ".js")]
    assert len(files) > 15 and all(file.read_text(encoding="utf-8") in html for file in files)
    assert not re.search(r"<script [^>]|<link rel=\"stylesheet", html), "nothing is left to be fetched"


def test_nothing_comes_from_elsewhere(html):
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, not an address"
    assert not re.search(r"<(?:iframe|object|embed|base)\b|@import|url\(|<script [^>]", html)
    assert re.findall(r'<link rel="(\w+)" href="data:', html) == ["icon"] and html.count("<link") == 1


def test_a_models_words_are_never_markup(html):
    code = re.sub(r"//.*", "", "".join(re.findall(r"<script>(.*?)</script>", html, re.DOTALL)))
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
                   "setAttribute(\"on", "srcdoc", "DOMParser", "createContextualFragment", "import("):
        assert banned not in code
    assert not re.search(r"\son\w+=", html), "the policy would block handlers in attributes"
    assert not re.search(r"\sstyle=", html)


def test_every_element_that_a_script_looks_up_is_there(html):
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    fields = {f"field-{name}" for name in re.findall(r'{ name: "(\w+)", label:', html)}
    assert len(fields) == 9 and set(re.findall(r'\bat\("([\w-]+)"\)', html)) <= ids | fields
