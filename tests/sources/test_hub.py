from __future__ import annotations

import errno
import warnings
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save

from quantkit.sources.hub import KIND
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError

SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = save({"a": torch.ones(2, 2)})
REPO = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "tokenizer.json": b"{}",
        "chat_template.jinja": b"x", "pytorch_model.bin": b"\x80\2", "modeling_evil.py": b"open('ran', 'w')",
        "README.md": b"x", "onnx/model.safetensors": WEIGHTS, "consolidated.safetensors": WEIGHTS,
        "original/tokenizer.model": b"x", ".gitattributes": b"x", "x.gguf": b"GGUF"}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


class FakeHub:
    """``snapshot_download`` over a dictionary, into folders laid as in the hub's cache."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.repo, self.error, self.calls = cache, dict(REPO), None, []

    def __call__(self, name, *, revision=None, allow_patterns=None, ignore_patterns=None):
        self.calls.append((name, revision))
        if self.error:
            raise self.error
        snapshot, blobs = self.cache / "snapshots" / SHA, self.cache / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        kept = filter_repo_objects(self.repo, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for i, file in enumerate(kept):
            (blobs / str(i)).write_bytes(self.repo[file])
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / file).symlink_to(f"../../blobs/{i}")
        return str(snapshot)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_model_with_its_commit(hub):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = open_source("owner/name", SHA)
    assert hub.calls == [("owner/name", SHA)]
    assert source.config() == {"model_type": "llama"} and source.tensor("a").sum() == 4
    assert source.side_files() == {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    identity = source.identity()
    assert (identity.kind, identity.uri) == ("hub", "hf:owner/name")
    assert (identity.revision, identity.pinned) == (SHA, True)
    assert set(identity.files) == WANTED


@pytest.mark.parametrize("revision", [None, "main", "v1.0"])
def test_an_unpinned_model_warns_with_the_commit_and_records_it(hub, revision):
    with pytest.warns(UserWarning, match=f"not pinned.*--revision {SHA}"):
        source = open_source("hf:owner/name", revision)
    assert hub.calls == [("owner/name", revision)] and source.identity().revision == SHA


def test_no_pickle_and_no_code_is_downloaded(hub):
    open_source("owner/name", SHA)
    snapshot = hub.cache / "snapshots" / SHA
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*")} == WANTED
    assert not Path("ran").exists()


def http(cls, text: str = "401 Client Error"):
    error = cls.__new__(cls)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize("error,what,next_step", [
    (http(errors.GatedRepoError), "owner/name is gated", "hf auth login"),
    (http(errors.RepositoryNotFoundError), "no model 'owner/name'", "check the name"),
    (http(errors.RevisionNotFoundError), "no revision 'v9'", "commits"),
    (errors.HFValidationError("bad name"), "no model 'owner/name'", "check the name"),
    (errors.LocalEntryNotFoundError("outgoing traffic has been disabled"), "can't be reached", "connection"),
    (http(errors.HfHubHTTPError, "500 Server Error\nmore"), "download of owner/name failed", "--revision v9"),
    (OSError(errno.ENOSPC, "No space left on device"), "doesn't fit on the disk", "HF_HOME"),
    (ConnectionError("reset"), "download of owner/name failed", "run it again"),
    (RuntimeError(""), "download of owner/name failed", "run it again"),
])
def test_what_goes_wrong_says_what_to_do(hub, error, what, next_step):
    hub.error = error
    with pytest.raises(SourceError, match=what) as caught:
        open_source("owner/name", "v9")
    assert next_step in (caught.value.next or "") and "\n" not in (caught.value.why or "")


def test_repositories_of_other_kinds(hub):
    hub.repo = {"pytorch_model.bin": b"x", "config.json": b"{}"}
    with pytest.raises(SourceError, match="no safetensors") as caught:
        open_source("owner/name", SHA)
    assert "pickles" in (caught.value.why or "")


def test_a_repository_of_gguf_files(hub):
    hub.repo = {"x.Q4_K_M.gguf": b"GGUF"}
    with pytest.raises(SourceError, match=r"no config\.json") as caught:
        open_source("owner/name", SHA)
    assert "quantkit inspect owner/name:Q4_K_M" in (caught.value.next or "")


def test_a_quantized_model_is_refused(hub):
    hub.repo["config.json"] = b'{"quantization_config": {}}'
    hub.repo["model.safetensors"] = save({"a.qweight": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(SourceError, match="already quantized"):
        open_source("owner/name", SHA)


def test_matches():
    assert all(KIND.matches(u) for u in ("owner/name", "hf:o/n", "HuggingFaceTB/SmolLM2-135M", "a/b.c_d-e"))
    assert not any(KIND.matches(u) for u in ("name", "a/b/c", "/a/b", "../a", "a/", "hf:", "a/b c", "-a/b",
                                             "a/" + "b" * 97, "a/b\n"))


def test_offline_without_a_cache(tmp_path, monkeypatch):
    """The real client: it must not be asked to look anywhere."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="can't be reached"):
        open_source("owner/name")
    with pytest.raises(SourceError, match=r"no model 'owner/a--b'|can't be reached"):
        open_source("owner/a--b")
