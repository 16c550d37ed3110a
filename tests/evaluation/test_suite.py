"""Named settings."""

from types import SimpleNamespace

import pytest

from quantkit.evaluation.suite import load_suite
from quantkit.plugins.hooks import hookimpl
from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError


def test_what_is_shipped_loads():
    standard, quick = load_suite("standard"), load_suite("quick")
    assert (standard.window, [text.name for text in standard.texts]) == (
        512, ["prose", "code", "dialogue", "german"])
    assert standard.speed.batches == (1, 4, 16) and standard.floor and standard.roofline
    assert quick.window * quick.windows < standard.window * standard.windows


def test_an_unknown_one_names_the_nearest():
    with pytest.raises(UsageError, match="standrad") as caught:
        load_suite("standrad")
    assert "'standard'" in caught.value.why and "quick" in caught.value.why and caught.value.next


def test_every_shipped_suite_is_called_as_its_file(root):
    for path in sorted((root / "evals").glob("*.yaml")):
        found = load_suite(path.stem)
        assert found.name == path.stem and found.description.endswith(".")


@pytest.fixture
def folder(tmp_path):
    """A plugin's folder of suites, beside the shipped ones."""
    current.cache_clear()
    current().add(SimpleNamespace(eval_dirs=hookimpl(lambda: [tmp_path])), "somebody")
    yield tmp_path
    current.cache_clear()


def test_a_plugins_suite_is_found(folder):
    (folder / "mine.yaml").write_text("name: mine\ndescription: Mine.\nwindow: 32\nwindows: 2\n")
    found = load_suite("mine")
    assert (found.text, found.window, found.windows) == ("builtin", 32, 2)


def test_two_of_a_name_are_refused(folder):
    (folder / "mine.yaml").write_text("name: mine\ndescription: Mine.\n")
    (folder / "other").mkdir()
    (folder / "other" / "mine.yaml").write_text("name: mine\ndescription: Mine too.\n")
    current().add(SimpleNamespace(eval_dirs=hookimpl(lambda: [folder / "other"])), "somebody-else")
    with pytest.raises(UsageError) as caught:
        load_suite("mine")
    assert "two suites" in caught.value.what and str(folder) in caught.value.why
    assert "somebody)" in caught.value.why and "pip uninstall somebody-else" in caught.value.next


def test_a_shipped_suite_stays_what_it_is(folder):
    shipped = load_suite("quick")
    (folder / "quick.yaml").write_text("name: quick\ndescription: Mine.\n")
    with pytest.warns(UserWarning, match="of somebody is left out: 'quick' is a name of quantkit's own"):
        assert load_suite("quick") == shipped


@pytest.mark.parametrize(("content", "said"), [
    ("name: bad\ndescription: x\nwindows: 0\n", "windows"),
    ("name: bad\ndescription: x\nwindow: '512'\n", "window"),
    ("name: bad\n", "description"),
    ("name: bad\nname: bad\ndescription: x\n", "name"),
    ("name: bad\ndescription: x\nwindowz: 5\n", "windowz"),
    ("- 1\n", "bad.yaml"),
    ("name: !!python/object:os.system x\n", "bad.yaml")])
def test_a_malformed_one_says_where(folder, content, said):
    (folder / "bad.yaml").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_suite("bad")
    assert said in str(caught.value)


def test_a_suites_file_names_no_place_but_its_own_folder(tmp_path):
    suite = tmp_path / "mine.yaml"
    head = "name: mine\ndescription: Mine.\ntexts:\n"
    suite.write_text(head + "  - {name: a, text: novel.txt}\n  - {name: b, text: 'builtin:code'}\n")
    assert [text.text for text in load_suite(str(suite)).texts] == [
        str(tmp_path / "novel.txt"), "builtin:code"]
    for place in ("/etc/passwd", "../novel.txt", "~/novel.txt", ".hidden"):
        suite.write_text(head + f"  - {{name: a, text: '{place}'}}\n")
        with pytest.raises(UsageError, match="not a valid"):
            load_suite(str(suite))
    suite.write_text(head + "  - {name: a, text: builtin}\n  - {name: a, text: builtin}\n")
    with pytest.raises(UsageError):
        load_suite(str(suite))
