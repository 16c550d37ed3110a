"""The built-in drafters keep their promises, and the check notices what doesn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.quantization.run import quantize
from quantkit.runtime.drafting.base import DraftedText, Drafter, DraftSource
from quantkit.runtime.drafting.draft_model import ModelDrafter
from quantkit.runtime.drafting.low_bit import LowBitDrafter
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import PluginError, UsageError
from quantkit.testing import check_drafter, tiny_model


def test_ngrams() -> None:
    check_drafter(NgramDrafter)
    check_drafter(NgramDrafter, max_tokens=1, min_match=1, max_match=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model and the same in four bits."""
    folder = tmp_path_factory.mktemp("drafts")
    quantize(str(tiny_model(folder / "model", "mistral", head_dim=32)), "int4-rtn", folder / "int4")
    return str(folder / "model"), str(folder / "int4")


@pytest.mark.parametrize("least_chance", [0.0, 0.2])
def test_the_model_in_fewer_bits(folders: tuple[str, str], least_chance: float) -> None:
    model, checkpoint = folders
    check_drafter(LowBitDrafter, model=model, checkpoint=checkpoint, least_chance=least_chance)


@pytest.mark.parametrize("recipe", ["int8", "int8-head8-draft"])
def test_the_high_halves_of_int8(folders: tuple[str, str], tmp_path: Path, recipe: str) -> None:
    quantize(folders[0], recipe, tmp_path / "int8")
    check_drafter(LowBitDrafter, model=str(tmp_path / "int8"), least_chance=0.0)
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


@pytest.mark.parametrize("least_chance", [0.0, 0.2])
def test_another_model(folders: tuple[str, str], tmp_path: Path, least_chance: float) -> None:
    other = tiny_model(tmp_path / "other", "qwen3", num_hidden_layers=1)
    check_drafter(ModelDrafter, model=folders[0], checkpoint=str(other), least_chance=least_chance)


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


class Odd(Drafter):
    """Drafts as its test wants it."""

    name: ClassVar[str] = "odd"

    def start(self, target: object) -> DraftSource:
        return OddSource()


class OddSource(DraftSource):
    """The same."""

    does: ClassVar[Callable[..., list[list[int]]]]

    def propose(self, texts: list[DraftedText], limits: list[int]) -> list[list[int]]:
        return type(self).does(texts, limits)


def grows(texts: list[DraftedText], limits: list[int]) -> list[list[int]]:
    texts[0].tokens.append(5)
    return [[] for _ in texts]


def leaves_tokens(texts: list[DraftedText], limits: list[int]) -> list[list[int]]:
    cache, number = texts[0].cache, texts[0].sequence
    cache.reserve(cache.sequence(number), 1)
    Batch(cache, [number], "decode", tentative=[0]).advance(0, 1)
    return [[] for _ in texts]


@pytest.mark.parametrize(("does", "message"), [
    (lambda texts, limits: [[1] * 40 for _ in texts], "a draft has 40 tokens where 1 are allowed"),
    (lambda texts, limits: [[-1] for _ in texts], "token ids"), (lambda texts, limits: [], "for 1 texts"),
    (lambda texts, limits: 1 / 0, "propose raises ZeroDivisionError"), (grows, "changes a text's tokens"),
    (leaves_tokens, "leaves tokens in the model's KV cache")])
def test_what_breaks_a_promise(does, message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddSource, "does", staticmethod(does), raising=False)
    with pytest.raises(PluginError, match=message):
        check_drafter(Odd)
