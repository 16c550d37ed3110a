"""The drafters that are models: what they read, and for which models they can't draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantkit.quantization.run import quantize
from quantkit.runtime.drafting.draft_model import LowBitDrafter, ModelDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model and the same in four bits."""
    folder = tmp_path_factory.mktemp("drafts")
    quantize(str(tiny_model(folder / "model", "mistral", head_dim=32)), "int4-rtn", folder / "int4")
    return str(folder / "model"), str(folder / "int4")


@pytest.mark.parametrize("recipe", ["int8", "int8-head8-draft"])
def test_the_high_halves_of_int8(folders: tuple[str, str], tmp_path: Path, recipe: str) -> None:
    quantize(folders[0], recipe, tmp_path / "int8")
    loaded, text = load(str(tmp_path / "int8")), [[5 + at % 90 for at in range(40)]]
    plain = loaded.model(torch.tensor(text))
    nbytes = loaded.model.step_bytes
    draft = loaded.model.high_halves()
    assert torch.equal(loaded.model(torch.tensor(text)), plain) and loaded.model.step_bytes == nbytes
    coarse = draft(torch.tensor(text))
    assert 0 < (coarse - plain).abs().max() < 0.5 * plain.abs().max() and draft.step_bytes < nbytes


def test_without_int8_there_are_no_high_halves(folders: tuple[str, str]) -> None:
    for folder in folders:
        with pytest.raises(UsageError, match="has no high halves to draft with"):
            LowBitDrafter().start(load(folder))


def test_a_long_text_is_read_in_parts(tmp_path: Path) -> None:
    """Nothing is drafted before all of it was read; the model drafts for itself, so all of it is right."""
    folder = str(tiny_model(tmp_path / "roomy", max_position_embeddings=2048))
    loaded = load(folder)
    tokens = [5 + at % 90 for at in range(1200)]
    engine = Engine(loaded, drafter=ModelDrafter(checkpoint=folder, least_chance=0))
    request = engine.submit(tokens, Sampling(max_tokens=60, ignore_eos=True))
    while engine.step():
        pass
    plain = generate(loaded, [tokens], Sampling(max_tokens=60, ignore_eos=True))[0]
    assert request.result.token_ids == plain.token_ids
    assert request.result.drafted_tokens == request.result.accepted_tokens > 10


def test_a_tokenizer_of_its_own_is_refused(folders: tuple[str, str], tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "mistral", head_dim=32)
    file = Path(other) / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    first, second = list(data["model"]["vocab"])[:2]
    vocab = data["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError, match="can't draft for"):
        ModelDrafter(checkpoint=str(other)).start(load(folders[0]))


def test_only_of_the_same_model(folders: tuple[str, str], tmp_path: Path) -> None:
    other = load(str(tiny_model(tmp_path / "other", "mistral", head_dim=32, num_hidden_layers=3)))
    with pytest.raises(UsageError, match="can't draft for"):
        LowBitDrafter(checkpoint=folders[1]).start(other)
