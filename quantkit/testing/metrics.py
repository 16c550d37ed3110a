"""The contract of metrics: ``quantkit.evaluation.metrics.Metric``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from quantkit.evaluation.metric_table import reason_against_metric, reason_of
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Metric
from quantkit.evaluation.quality.window_scores import scored
from quantkit.support.errors import PluginError
from quantkit.testing.contract import Contract

_CLOSE = 1e-4
_PROMISES = "quantkit.evaluation.metrics.Metric"
Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-probabilities of the reference and of the candidate ``[T, vocab]``, and targets ``[T]``."""


def check_metric(metric: Metric) -> None:
    """Score ordinary and awkward windows as ``quantkit eval`` would, and check what
    :class:`~quantkit.evaluation.metrics.Metric` promises.

    The windows: of one token, of a huge vocabulary, of equal models, with ties, with excluded tokens
    (log-probability −∞) and float64. Checked are the declaration, shapes, dtypes,
    NaN, that a token's score doesn't depend on its neighbors, that two calls agree, that no argument is
    written to and the global random generator is left alone; and ``of_mean``: shapes, and per token and
    window that it doesn't decrease.

    Args:
        metric: the metric, with the key that it will have.

    Raises:
        PluginError: a promise is broken; the window is named.
    """
    if not isinstance(metric, Metric):
        raise PluginError(f"a {type(metric).__name__} is no metric", why=f"it must be a {_PROMISES}")
    contract = Contract(f"metric {metric.name!r}", _PROMISES)
    if metric not in (PERPLEXITY, KL, TOP1) and (problem := reason_against_metric(metric)) is not None:
        raise contract.error(f"it can't be registered: {problem}")
    means = {name: _checked(metric, window, contract.at(f"window {name!r}"))
             for name, window in _windows().items()}
    contract.must(len({mean.shape for mean in means.values()}) == 1,
                  "the number of statistics changes from window to window")
    contract.must(np.allclose(means["ordinary"], means["ordinary, float64"], rtol=_CLOSE, atol=_CLOSE),
                  "float64 log-probabilities give another score than the same in float32")
    contract.must(len({mean.tobytes() for mean in means.values()}) > 1,
                  "it has the same score for every model and text, so it measures nothing")
    _check_of_mean(metric, means, contract)


def _windows() -> dict[str, Window]:
    random = torch.Generator().manual_seed(0)

    def logits(tokens: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
        return torch.randn(tokens, vocab, generator=random) * scale

    def window(reference: torch.Tensor, candidate: torch.Tensor) -> Window:
        # a token that the model finds likely, as text has them
        targets = torch.multinomial(reference.float().softmax(-1), 1, generator=random)[:, 0]
        return reference.log_softmax(-1), candidate.log_softmax(-1), targets

    plain = logits(40, 97)
    noisy = plain + logits(40, 97, 0.5)
    ordinary = window(plain, noisy)
    excluded, masked = plain.clone(), noisy.clone()
    excluded[:, 50:] = -torch.inf
    masked[:, 60:] = -torch.inf
    large = logits(3, 262_144)
    return {
        "ordinary": ordinary,
        "ordinary, float64": (ordinary[0].double(), ordinary[1].double(), ordinary[2]),
        "one token": window(logits(1, 97), logits(1, 97)),
        "equal models": window(plain, plain),
        "ties": window(torch.zeros(7, 97), torch.zeros(7, 97)),
        "excluded tokens": window(excluded, masked),
        "tokens that the candidate excludes": window(plain, masked),
        "huge vocabulary": window(large, large + logits(3, 262_144, 0.1)),
    }


@torch.inference_mode()
def _checked(metric: Metric, window: Window, contract: Contract) -> np.ndarray:
    """The mean score ``[]``, per run ``[K]``."""
    must = contract.must
    count, names = len(window[2]), ("reference", "candidate", "targets")

    def total_of_all() -> torch.Tensor:
        return torch.as_tensor(np.asarray(_total(metric, window, contract)))

    total = contract.pure("score", total_of_all, dict(zip(names, window))).numpy()
    if metric.per == "window":
        return total
    reference, candidate, targets = window
    halves = [_total(metric, (reference[part], candidate[part], targets[part]), contract)
              for part in (slice(count // 2), slice(count // 2, None)) if len(targets[part])]
    must(all(half.shape == total.shape for half in halves),
         "the number of statistics depends on the number of tokens")
    must(np.allclose(np.sum(halves, axis=0), total, rtol=_CLOSE, atol=_CLOSE * count),
         "a token's score depends on the other tokens of its part")
    mean: np.ndarray = total / count
    return mean


def _total(metric: Metric, window: Window, contract: Contract) -> np.ndarray:
    try:
        return scored(metric, *window)
    except Exception as error:  # of the metric's code, or what it returned
        raise contract.error(reason_of(error)) from error


def _check_of_mean(metric: Metric, means: Mapping[str, np.ndarray], contract: Contract) -> None:
    must = contract.must
    finite = np.stack([mean for mean in means.values() if np.isfinite(mean).all()])
    if metric.per == "run":
        grid = np.stack([finite[0], *finite]).reshape(1, -1, finite.shape[-1])
    else:
        spread = np.linspace(finite.min(), finite.max(), 64)
        grid = np.stack([spread, spread])
    before = grid.copy()
    shape = grid.shape[:-1] if metric.per == "run" else grid.shape
    for part, expected in ((grid, shape), (grid[0], shape[1:]), (grid[0, 0], shape[2:])):
        with np.errstate(all="ignore"):
            values = np.asarray(contract.call(f"of_mean of means {list(part.shape)}", metric.of_mean, part))
        must(values.shape == expected and values.dtype.kind in "fiub",
             f"of_mean makes {values.dtype} {list(values.shape)} of means {list(part.shape)}; "
             f"it should be real numbers {list(expected)}")
        must(not np.isnan(values).any(), "of_mean returns NaN")
        if part is grid:
            rows = values
    must(np.array_equal(grid, before), "of_mean writes to its argument", "work on a copy: mean.copy()")
    single = np.asarray([metric.of_mean(mean) for mean in grid[0]])
    must(np.allclose(single, rows[0], rtol=_CLOSE, atol=_CLOSE),
         "of_mean of one mean depends on the other means")
    must(metric.per == "run" or bool((np.diff(rows[0]) >= 0).all()),
         "of_mean decreases, and intervals are taken of means and put through it")
    for name, mean in means.items():
        try:
            metric.summarize(np.stack([mean, mean]))
        except Exception as error:
            raise contract.at(f"window {name!r}").error(reason_of(error)) from error
