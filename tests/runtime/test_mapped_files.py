"""Plain weights are pages of their files: nothing is copied, and a file that was changed gives no token."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.quantization.run import quantize
from quantkit.runtime import loader
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model

IDS, FOUR = [5, 6, 7, 8], Sampling(max_tokens=4, ignore_eos=True)
FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tiny_model(tmp_path / "m", vocab_size=320, head_dim=32)


def tokens(loaded):
    return generate(loaded, [IDS], FOUR)[0].token_ids


def overwrite(file):
    with file.open("r+b") as stream:
        stream.seek(-64, os.SEEK_END)
        stream.write(bytes(64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_plain_weight_is_copied(tmp_path, dtype):
    folder = tiny_model(tmp_path / "m", dtype=dtype, vocab_size=320)
    loaded = load(str(folder))
    mapped = loaded.files[0]._mapped()
    begin = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    for linear in loaded.model.linears().values():
        assert begin <= linear.weight.weights.data_ptr() < begin + len(mapped), linear.name


def test_a_file_that_is_overwritten_gives_no_token(folder):
    loaded = load(str(folder))
    assert len(tokens(loaded)) == 4
    overwrite(folder / FILE)
    with pytest.raises(SourceError, match="was changed while the model in it was in memory"):
        tokens(loaded)
    with pytest.raises(SourceError, match="was changed"):
        HiddenStates(loaded, torch.tensor([IDS]))


def test_a_file_that_is_cut_ends_no_process(folder):
    loaded = load(str(folder))
    os.truncate(folder / FILE, 4096)
    with pytest.raises(SourceError, match="rename it"):
        tokens(loaded)


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_is_deleted_or_replaced_is_still_there(folder, tmp_path, replace):
    loaded = load(str(folder))
    before = tokens(loaded)
    if replace:
        other = tiny_model(tmp_path / "other", seed=1, vocab_size=320, head_dim=32)
        shutil.copy(other / FILE, folder / "new")
        (folder / "new").replace(folder / FILE)
        assert tokens(load(str(folder))) != before
    else:
        (folder / FILE).unlink()
    assert tokens(loaded) == before


def test_a_file_that_changes_while_it_is_loaded(folder, monkeypatch):
    build = loader.build_model

    def slow(*arguments):
        model = build(*arguments)
        overwrite(folder / FILE)
        return model

    monkeypatch.setattr(loader, "build_model", slow)
    with pytest.raises(SourceError, match="was changed"):
        load(str(folder))


def test_pages_come_back_when_they_are_needed(folder):
    loaded = load(str(folder))
    before = tokens(loaded)
    for file in loaded.files:
        file.release()
    assert tokens(loaded) == before


def test_what_was_packed_needs_no_file(folder, tmp_path):
    (tmp_path / "all8.yaml").write_text(
        'rules:\n  - {match: "*", method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}\n')
    quantize(str(folder), str(tmp_path / "all8.yaml"), tmp_path / "q")
    loaded = load(str(tmp_path / "q"), dtype="float16")  # other than the file's: norms are copied too
    before = tokens(loaded)
    overwrite(tmp_path / "q" / FILE)
    assert tokens(loaded) == before
