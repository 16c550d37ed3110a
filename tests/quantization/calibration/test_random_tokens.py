"""Calibration without text: which tokens are drawn, and what their Hessians keep."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.architecture import parse_config
from quantkit.models.linear import Weights
from quantkit.quantization.calibration.data import CORRELATION, OFFSET, correlation, prepare, random_windows
from quantkit.quantization.calibration.runner import HessianObserver, LayerRunner
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.support.errors import CalibrationError
from quantkit.testing import tiny_model
from quantkit.text.tokenizer import Tokenizer
from tests.helpers.folders import contents

RANDOM = CalibrationSpec(text="random", windows=4, window=32, importance="equal")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "model"))


def test_tokens_follow_zipfs_law_and_never_are_special() -> None:
    tokens = random_windows(400, 512, 300, {0, 7, 500}, seed=3)
    assert tokens.dtype == torch.int64 and tokens.shape == (400, 512)
    counts = np.bincount(tokens.flatten().numpy(), minlength=300)
    assert counts.size == 300 and counts[0] == counts[7] == 0
    wanted = 1 / (np.arange(300) + OFFSET)
    wanted[[0, 7]] = 0
    wanted *= tokens.numel() / wanted.sum()
    assert np.all(np.abs(counts - wanted) <= 5 * np.sqrt(wanted))


def test_the_seed_alone_decides() -> None:
    tokens = random_windows(3, 20, 1000, (), seed=1)
    state = torch.random.get_rng_state()
    assert torch.equal(tokens, random_windows(3, 20, 1000, (), seed=1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(tokens, random_windows(3, 20, 1000, (), seed=2))


def test_the_last_token_can_be_drawn_and_nothing_beyond() -> None:
    tokens = random_windows(1, 200, 3, {0, 1}, seed=0)
    assert tokens.unique().tolist() == [2]


def test_what_is_drawn_for_a_model(model: str) -> None:
    source = open_source(model)
    tokenizer = Tokenizer(source.side_files(), source.config())
    with warnings.catch_warnings():  # a Hessian of few random tokens has full rank
        warnings.simplefilter("error")
        data = prepare(RANDOM, source, 4096)
    assert data is not None and data.tokens.shape == (4, 32) and data.files == ()
    assert data.origins[2] == "random, window 2"
    assert not set(data.tokens.unique().tolist()) & set(tokenizer.added_tokens.values())
    with pytest.raises(CalibrationError, match="longer than the model's context"):
        prepare(RANDOM.model_copy(update={"window": 1 << 20}), source, 0)


def test_hessians_keep_their_diagonals_and_a_part_of_the_rest() -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) @ torch.ones(40, 40).tril()
    text, drawn = HessianObserver("layer"), HessianObserver("layer", correlation=0.4)
    text(x)
    drawn(x)
    full, reduced = text.result().hessian, drawn.result().hessian
    assert full is not None and reduced is not None
    wanted = full.double().numpy() * (0.4 + 0.6 * np.eye(40))
    np.testing.assert_allclose(reduced.numpy(), wanted, rtol=1e-6)
    assert torch.equal(reduced.diagonal(), full.diagonal()) and torch.equal(reduced, reduced.T)
    assert float(torch.linalg.eigvalsh(reduced.double())[0]) > 0


def test_only_random_tokens_are_treated_so(model: str) -> None:
    assert correlation(RANDOM) == CORRELATION < 1
    for spec in (None, CalibrationSpec(), CalibrationSpec(text="self")):
        assert correlation(spec) == 1
    source = open_source(model)
    config, tokens = parse_config(source.config()), random_windows(4, 32, 100, (), seed=0)
    weights = Weights(source.tensor, source.tensors().__contains__, torch.float32)
    full, reduced = (LayerRunner(config, weights, tokens, correlation=factor).measure(0)
                     for factor in (1.0, 0.5))
    for name in full:
        form, other = full[name].hessian, reduced[name].hessian
        assert form is not None and other is not None
        diagonal = form.diagonal().diag()
        torch.testing.assert_close(other, 0.5 * (form + diagonal))


def test_random_tokens_are_not_mixed_with_texts() -> None:
    with pytest.raises(ValidationError, match="can't be mixed"):
        CalibrationSpec(text=("random", "a.txt"))
    assert CalibrationSpec(text="random").without_folders().text == "random"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_recipes_without_text(model: str, tmp_path: Path, bits: int) -> None:
    recipe = load_recipe(f"int{bits}-datafree")
    assert recipe.calibration is not None and recipe.calibration.text == "random"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = quantize(model, recipe, tmp_path / "out", calibration=RANDOM).out
        again = quantize(model, recipe, tmp_path / "again", calibration=RANDOM).out
    assert contents(again) == contents(out)
    with Checkpoint.open(out) as checkpoint:
        facts, rows = checkpoint.manifest.calibration, checkpoint.manifest.layers
    assert facts is not None and facts.text == "random" and facts.tokens == 128
    assert {row.method for row in rows if "layers" not in row.name} == {"rtn"}
    solved = [row for row in rows if row.method == "gptq"]
    assert solved and all(row.spec and row.spec.bits == bits and row.spec.symmetric == (bits == 8)
                          for row in solved)
