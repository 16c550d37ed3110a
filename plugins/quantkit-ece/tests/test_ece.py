"""The calibration error against its definition, written once more in numpy."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch

from quantkit.evaluation.metrics import Interval
from quantkit.testing import check_metric, tiny_model
from quantkit_ece.metric import BINS, METRIC


def oracle(logprobs: np.ndarray, targets: np.ndarray) -> float:
    """Bin by bin, as the paper has it."""
    confidence, right = np.exp(logprobs).max(-1), logprobs.argmax(-1) == targets
    error = 0.0
    for index in range(15):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def window(seed: int, scale: float, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logprobs = (torch.randn(tokens, 50, generator=random, dtype=torch.float64) * scale).log_softmax(-1)
    # some are right, more of them where the model is sure
    chance = torch.multinomial(logprobs.exp() * 0.7 + 0.3 / 50, 1, generator=random)[:, 0]
    return logprobs.float(), chance


def summarized(windows: list[tuple[torch.Tensor, torch.Tensor]]) -> Interval:
    return METRIC.summarize(np.stack([METRIC.score(logs, logs, targets).mean(0).numpy()
                                      for logs, targets in windows]))


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 5.0, 40.0])
def test_it_is_the_paper_s_number(scale: float) -> None:
    windows = [window(seed, scale) for seed in range(6)]
    logs, targets = (torch.cat(parts).numpy() for parts in zip(*windows))
    assert summarized(windows).value == pytest.approx(oracle(logs.astype(np.float64), targets), abs=1e-6)


def test_the_error_is_of_the_run_not_of_its_windows() -> None:
    """One window too sure, one not sure enough, in one bin: together they are calibrated."""
    logs = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4, 1)
    right, wrong = torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 1])
    assert summarized([(logs, right), (logs, wrong)]).value == pytest.approx(0.0, abs=1e-7)
    assert summarized([(logs, right)]).value == pytest.approx(0.5)


def test_a_model_that_knows_what_it_knows_has_none() -> None:
    sure = torch.full((10, 4), -torch.inf)
    sure[:, 2] = 0
    assert summarized([(sure, torch.full((10,), 2))]) == Interval(0.0, 0.0, 0.0)
    assert summarized([(sure, torch.full((10,), 1))]).value == 1.0


@pytest.mark.parametrize("index", range(BINS))
def test_a_token_is_in_the_bin_of_its_confidence(index: int) -> None:
    for confidence in ((index + 1e-5) / BINS, (index + 1 - 1e-5) / BINS):
        logs = torch.full((1, 100_000), -torch.inf)
        logs[0, 7] = float(np.log(confidence))
        scores = METRIC.score(logs, logs, torch.tensor([1]))
        assert scores[0, index].item() == pytest.approx(-confidence, rel=1e-4)
        assert scores.count_nonzero() == 1


def test_the_interval_is_a_bootstrap_over_windows() -> None:
    few, many = (summarized([window(seed, 2.0) for seed in range(count)]) for count in (5, 80))
    assert few.low <= few.value <= few.high
    assert many.high - many.low < few.high - few.low


def test_the_kit() -> None:
    check_metric(METRIC)


@pytest.mark.slow
def test_eval_has_the_column(command: Callable[..., CompletedProcess[bytes]], tmp_path: Path) -> None:
    """As a user has it: found by its entry point, in the table, the report, the plot and JSON."""
    model, out = tiny_model(tmp_path / "tiny"), tmp_path / "out"
    table = command("eval", model, "--window", 32, "--windows", 3, "-q", "--no-speed",
                    "--plot", "kl_mean,ece", "--out", out).stdout.decode()
    results = json.loads((out / "results.json").read_text())
    assert results["metrics"]["ece"] == {"title": "ECE", "unit": "%", "direction": "lower", "per": "run",
                                         "distribution": "quantkit-ece"}
    row, = results["results"]
    assert 0 <= row["intervals"]["ece"][0] <= row["ece"] <= row["intervals"]["ece"][1] <= 1
    assert f"{100 * row['ece']:.3g}"[:3] in table and "ECE" in table
    assert "ECE" in (out / "report.md").read_text()
    assert "ECE, %, lower is better" in (out / "frontier.svg").read_text()
