"""Data sets on the hub: which file is meant, that it is pinned, and what goes wrong on the way."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from quantkit.quantization.calibration import hub as module
from quantkit.quantization.calibration.hub import DatasetName, dataset_files
from quantkit.support.errors import CalibrationError

SHA = "0123456789abcdef0123456789abcdef01234567"
SHARDS = {f"data/train-{i:05}-of-00003.parquet": 1000 for i in range(3)}


class FakeHub:
    """``HfApi`` and ``hf_hub_download`` over a dictionary of sizes."""

    def __init__(self, folder) -> None:
        self.folder, self.files, self.error, self.asked = folder, dict(SHARDS), None, []

    def HfApi(self):
        return self

    def dataset_info(self, name, *, revision=None, files_metadata=False):
        self.asked.append(("list", name, revision))
        if self.error:
            raise self.error
        assert files_metadata
        return SimpleNamespace(sha=SHA, siblings=[SimpleNamespace(rfilename=f, size=s)
                                                  for f, s in self.files.items()])

    def hf_hub_download(self, name, file, *, repo_type, revision):
        self.asked.append((file, repo_type, revision))
        if self.error:
            raise self.error
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        return str(path)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", made.HfApi)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.hf_hub_download)
    monkeypatch.setattr(module, "has_pyarrow", lambda: True)
    return made


@pytest.mark.parametrize(("text", "expected"), [
    ("hub:a/b", ("a/b", None, None, None)),
    ("hub:a/b:test", ("a/b", None, "test", None)),
    ("hub:a/b:x/y.parquet", ("a/b", None, None, "x/y.parquet")),
    ("hub:a/b:test:y.jsonl", ("a/b", None, "test", "y.jsonl")),
    ("hub:a/b@v1.0:test", ("a/b", "v1.0", "test", None)),
    ("hub:a/b@refs/convert/parquet", ("a/b", "refs/convert/parquet", None, None))])
def test_names(text, expected):
    name = DatasetName.parse(text)
    assert (name.repo, name.revision, name.split, name.file) == expected


@pytest.mark.parametrize("text", ["hub:", "hub:a", "hub:a/b/c", "hub:a/b:", "hub:a/b:x:y:z", "hub:../b",
                                  "hub:a/b:../y.jsonl", "hub:a/b:/etc/y.jsonl", "hub:a/b:x//y.jsonl"])
def test_what_is_no_name(text):
    with pytest.raises(CalibrationError, match="names no data set") as caught:
        DatasetName.parse(text)
    assert "hub:OWNER/NAME" in caught.value.next


def test_as_many_files_of_the_split_as_are_needed_with_their_commit(fake):
    fake.files |= {"data/test-00000-of-00001.parquet": 9, "README.md": 9, "load.py": 9}
    heard = []
    with pytest.warns(UserWarning, match=f"not pinned.*hub:a/b@{SHA}"):
        found = dataset_files("hub:a/b", 1500, heard.append)
    assert [one.name for one in found] == [f"hub:a/b/{file}" for file in list(SHARDS)[:2]]
    assert {one.revision for one in found} == {SHA} and all(one.path.is_file() for one in found)
    assert fake.asked == [("list", "a/b", None), *((file, "dataset", SHA) for file in list(SHARDS)[:2])]
    assert [event.label for event in heard] == [f"downloading {file}" for file in list(SHARDS)[:2]]


def test_a_file_of_a_commit_needs_no_question(fake):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = dataset_files(f"hub:a/b@{SHA}:data/x.jsonl", 1)
    assert found.revision == SHA and fake.asked == [("data/x.jsonl", "dataset", SHA)]


@pytest.mark.filterwarnings("ignore:hub")
def test_another_split_or_the_only_file(fake):
    fake.files = {"train.jsonl": 1, "test.jsonl": 1}
    assert dataset_files("hub:a/b:test", 1)[0].name == "hub:a/b/test.jsonl"
    fake.files = {"chats.jsonl": 1, "README.md": 1}
    assert dataset_files("hub:a/b", 1)[0].name == "hub:a/b/chats.jsonl"


@pytest.mark.parametrize(("text", "files", "said", "then"), [
    ("hub:a/b", {}, "holds no", "refs/convert/parquet"),
    ("hub:a/b", {"load.py": 1}, "holds no", "refs/convert/parquet"),
    ("hub:a/b:valid", SHARDS, "no files of the split 'valid'", "hub:a/b:data/train"),
    ("hub:a/b", {"en/train-0.jsonl": 1, "de/train-0.jsonl": 1}, "several sets", "hub:a/b:de/train-0.jsonl"),
    ("hub:a/b@v1:train", {"en/train-0.jsonl": 1, "de/train-0.jsonl": 1}, "several sets",
     "hub:a/b@v1:de/train-0.jsonl"),
    ("hub:a/b:data/trian.parquet", SHARDS, "has no file 'data/trian.parquet'", "hub:OWNER/NAME"),
    ("hub:a/b", {"trains/x.jsonl": 1, "y.jsonl": 1}, "no files of the split 'train'", "hub:a/b:trains/x")])
@pytest.mark.filterwarnings("ignore:hub")
def test_when_it_is_not_clear_what_is_meant(fake, text, files, said, then):
    fake.files = files
    with pytest.raises(CalibrationError, match=said) as caught:
        dataset_files(text, 1)
    assert then in caught.value.next


@pytest.mark.filterwarnings("ignore:hub")
def test_parquet_without_pyarrow(fake, monkeypatch):
    monkeypatch.setattr(module, "has_pyarrow", lambda: False)
    with pytest.raises(CalibrationError, match="needs pyarrow") as caught:
        dataset_files("hub:a/b", 1)
    assert "pip install pyarrow" in caught.value.next and len(fake.asked) == 1
    fake.files["data/train.jsonl"] = 1
    assert dataset_files("hub:a/b", 1)[0].name.endswith("train.jsonl")


def http(cls, text: str = "401 Client Error"):
    error = cls.__new__(cls)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(("error", "what", "then"), [
    (http(errors.GatedRepoError), "is gated", "hf auth login"),
    (http(errors.RevisionNotFoundError), "no revision 'v9'", "/commits"),
    (http(errors.RepositoryNotFoundError), "no data set 'a/b'", "check the name"),
    (http(errors.EntryNotFoundError), "has no file", "/tree/main"),
    (errors.LocalEntryNotFoundError("offline"), "can't be downloaded", "check the connection"),
    (ConnectionError("no route\nmore"), "can't be downloaded", "check the connection")])
def test_what_goes_wrong_on_the_way(fake, error, what, then):
    fake.error = error
    with pytest.raises(CalibrationError, match=what) as caught:
        dataset_files("hub:a/b@v9:x.jsonl", 1)
    assert then in caught.value.next


@pytest.mark.parametrize(("text", "pinned"), [
    ("hub:a/b:test", "hub:a/b@{}:test"), ("hub:a/b@main:x/y.jsonl", "hub:a/b@{}:x/y.jsonl"),
    ("hub:a/b", "hub:a/b@{}")])
def test_the_warning_names_the_same_files_of_a_commit(fake, text, pinned):
    fake.files = {"x/y.jsonl": 1, "test.jsonl": 1, "train.jsonl": 1}
    with pytest.warns(UserWarning, match="for these again") as caught:
        dataset_files(text, 1)
    assert str(caught[0].message).endswith("for these again: " + pinned.format(SHA))
