"""Texts that models are compared on."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from quantkit.evaluation import text as module
from quantkit.evaluation.text import load_text, prose
from quantkit.support.errors import UsageError


def test_the_builtin_one_is_prose_and_the_same_twice():
    text = load_text()
    assert text.name.startswith("pydoc-topics-3.")
    assert len(text.content) > 200_000
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest() == load_text("builtin").sha256


def test_a_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffgrün\n".encode())
    text = load_text(str(tmp_path / "a.txt"))
    assert (text.name, text.content) == ("a.txt", "grün\n")


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_unusable_files(tmp_path, content):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_text(str(tmp_path / "a.txt"))
    assert "a.txt" in caught.value.what and caught.value.next


def test_a_folder_and_a_name_on_the_hub_that_lacks_a_file(tmp_path):
    with pytest.raises(UsageError):
        load_text(str(tmp_path))
    for name in ("hf://datasets/owner/name", "hf://datasets/owner/name/../../x"):
        with pytest.raises(UsageError, match="file"):
            load_text(name)


def test_the_builtin_one_is_paragraphs_without_code():
    lines = load_text().content.split("\n\n")
    assert not [line for line in lines if "\n" in line]
    assert not [line for line in lines if set(line) <= set("*=-~")]
    assert sum("::=" in line for line in lines) < 10


def test_prose_keeps_paragraphs_and_lists_and_drops_code():
    page = ("The title\n*********\n\nA paragraph of\ntwo lines.\n\n   code = 1\n\n   more = 2\n\n"
            "* an item\n  that goes on\n\nThe end.\n")
    assert prose(page) == "The title\n\nA paragraph of two lines.\n\n* an item that goes on\n\nThe end."


@pytest.mark.parametrize("page", ["", "\n\n", "   only code\n", "====\n"])
def test_prose_of_a_page_without_any_is_empty(page):
    assert prose(page) == ""


def test_a_file_is_used_whole(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("café\r\n\r\nend\n".encode())
    found = load_text(str(path))
    assert found.content == "café\r\n\r\nend\n"
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("abc")
    assert load_text("~/mine.txt").content == "abc"


@pytest.mark.parametrize("name", ["/no/such/file.txt", "no\0name", "~nobody-of-that-name/x"])
def test_a_path_that_leads_nowhere(name):
    with pytest.raises(UsageError) as caught:
        load_text(name)
    assert "can't be read" in caught.value.what and "builtin" in caught.value.next


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_an_endless_file_is_refused_early(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 2**20)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        load_text("/dev/zero")


def test_a_file_on_the_hub_is_had_at_its_revision(tmp_path, monkeypatch):
    (tmp_path / "wiki.test.raw").write_text("from the hub")
    asked = SimpleNamespace()

    def download(repo, file, *, repo_type, revision):
        asked.all = (repo, file, repo_type, revision)
        return str(tmp_path / "wiki.test.raw")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = load_text("hf://datasets/owner/name/raw/wiki.test.raw@0123abc")
    assert asked.all == ("owner/name", "raw/wiki.test.raw", "dataset", "0123abc")
    assert (found.name, found.content) == ("wiki.test.raw", "from the hub")
    load_text("hf://datasets/owner/name/wiki.test.raw")
    assert asked.all[-1] is None


@pytest.mark.parametrize("uri", ["hf://datasets/", "hf://datasets/owner", "hf://datasets/owner/name/",
                                 "hf://datasets//name/x", "hf://datasets/owner/name/./x"])
def test_a_name_on_the_hub_that_is_no_file_never_reaches_the_network(uri, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: pytest.fail("asked the network"))
    with pytest.raises(UsageError) as caught:
        load_text(uri)
    assert "OWNER/NAME/FILE" in caught.value.next


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("404 Client Error.\nRequest ID: x\nlong talk"), "404 Client Error."),
    (ConnectionError(), "ConnectionError")])
def test_a_download_that_fails_is_told_in_one_line(monkeypatch, error, said):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UsageError) as caught:
        load_text("hf://datasets/owner/name/x.txt")
    assert caught.value.why == said and "builtin" in caught.value.next
