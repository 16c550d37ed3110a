"""The contract of metrics: ``quantkit.evaluate.metrics.Metric``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from quantkit.errors import PluginError
from quantkit.evaluate.metric_table import metric_problem, reason_of
from quantkit.evaluate.metrics import KL, PERPLEXITY, TOP1, Metric
from quantkit.evaluate.window_scores import scored

_CLOSE = 1e-4
_WHY = "quantkit.evaluate.metrics.Metric says what a metric promises"
Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-probabilities of the reference and of the candidate ``[T, vocab]``, and targets ``[T]``."""


def check_metric(metric: Metric) -> None:
    """Score ordinary and awkward windows as ``quantkit eval`` would, and check what
    :class:`~quantkit.evaluate.metrics.Metric` promises.

    The windows: of one token, of a huge vocabulary, of equal models, with ties, with excluded tokens
    (log-probability −∞), float64, and not contiguous in memory. Checked are the declaration, shapes, dtypes,
    NaN, that a token's score doesn't depend on its neighbors, that two calls agree, that no argument is
    written to and the global random generator is left alone; and ``of_mean``: shapes, and per token and
    window that it doesn't decrease.

    Args:
        metric: the metric, with the key that it will have.

    Raises:
        PluginError: a promise is broken; the window is named.
    """
    if not isinstance(metric, Metric):
        raise PluginError(f"a {type(metric).__name__} is no metric", why=_WHY,
                          next="build a quantkit.evaluate.metrics.Metric")
    if metric not in (PERPLEXITY, KL, TOP1) and (problem := metric_problem(metric)) is not None:
        raise PluginError(f"metric {metric.name!r} can't be registered: {problem}", why=_WHY)
    means = {}
    for name, window in _windows().items():
        means[name] = _checked(metric, window, f"metric {metric.name!r}, window {name!r}")
    where = f"metric {metric.name!r}"
    widths = {mean.shape for mean in means.values()}
    if len(widths) > 1:
        raise PluginError(f"{where}: the number of statistics changes from window to window", why=_WHY)
    ordinary, exact = means["ordinary"], means["ordinary, float64"]
    if not np.allclose(ordinary, exact, rtol=_CLOSE, atol=_CLOSE):
        raise PluginError(f"{where}: float64 log-probabilities give another score than the same in float32",
                          why=_WHY)
    if len({mean.tobytes() for mean in means.values()}) == 1:
        raise PluginError(f"{where}: it has the same score for every model and text",
                          why="it measures nothing")
    _check_of_mean(metric, means, where)


def _windows() -> dict[str, Window]:
    """Ordinary and awkward ones."""
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
    both = torch.cat([plain, noisy], dim=1)
    large = logits(3, 262_144)
    return {
        "ordinary": ordinary,
        "ordinary, float64": (ordinary[0].double(), ordinary[1].double(), ordinary[2]),
        "one token": window(logits(1, 97), logits(1, 97)),
        "two words": window(logits(5, 2), logits(5, 2)),
        "equal models": window(plain, plain),
        "ties": window(torch.zeros(7, 97), torch.zeros(7, 97)),
        "excluded tokens": window(excluded, masked),
        "tokens that the candidate excludes": window(plain, masked),
        "sure models": window(plain * 1000, noisy * 1000),
        "huge vocabulary": window(large, large + logits(3, 262_144, 0.1)),
        "not contiguous": window(both[:, ::2], both[:, 1::2].contiguous().T.contiguous().T),
    }


@torch.inference_mode()
def _checked(metric: Metric, window: Window, where: str) -> np.ndarray:
    """The mean score ``[]``, per run ``[K]``."""
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}", why=_WHY)

    before, random = [tensor.clone() for tensor in window], torch.get_rng_state()
    count = len(window[2])
    total = _total(metric, window, where)
    must(all(torch.equal(tensor, copy) for tensor, copy in zip(window, before)),
         "score writes to an argument")
    must(torch.equal(random, torch.get_rng_state()), "score uses the global random generator")
    again = _total(metric, window, where)
    must(again.shape == total.shape and np.array_equal(total, again), "two calls differ")
    if metric.per == "window":
        return total
    parts = [tuple(tensor[begin:begin + size] for tensor in window)
             for begin, size in ((0, count // 2), (count // 2, count)) if begin + size > begin]
    divided = [_total(metric, (part[0], part[1], part[2]), where) for part in parts]
    must(all(part.shape == total.shape for part in divided),
         "the number of statistics depends on the number of tokens")
    must(np.allclose(np.sum(divided, axis=0), total, rtol=_CLOSE, atol=_CLOSE * count),
         "a token's score depends on the other tokens of its part")
    mean: np.ndarray = total / count
    return mean


def _total(metric: Metric, window: Window, where: str) -> np.ndarray:
    try:
        return scored(metric, *window)
    except Exception as error:
        raise PluginError(f"{where}: {reason_of(error)}", why=_WHY) from error


def _check_of_mean(metric: Metric, means: Mapping[str, np.ndarray], where: str) -> None:
    finite = np.stack([mean for mean in means.values() if np.isfinite(mean).all()])
    if metric.per == "run":
        grid = np.stack([finite[0], *finite]).reshape(1, -1, finite.shape[-1])
    else:
        spread = np.linspace(finite.min(), finite.max(), 64)
        grid = np.stack([spread, spread])
    before = grid.copy()
    shape = grid.shape[:-1] if metric.per == "run" else grid.shape
    for part, expected in ((grid, shape), (grid[0], shape[1:]), (grid[0, 0], shape[2:])):
        try:
            with np.errstate(all="ignore"):
                values = np.asarray(metric.of_mean(part))
        except Exception as error:
            raise PluginError(f"{where}: of_mean fails on means of shape {list(part.shape)}: "
                              f"{reason_of(error)}", why=_WHY) from error
        if values.shape != expected or values.dtype.kind not in "fiub":
            raise PluginError(f"{where}: of_mean makes {values.dtype} {list(values.shape)} of means "
                              f"{list(part.shape)}; it should be real numbers {list(expected)}", why=_WHY)
        if np.isnan(values).any():
            raise PluginError(f"{where}: of_mean returns NaN", why=_WHY)
        if part is grid:
            rows = values
    if not np.array_equal(grid, before):
        raise PluginError(f"{where}: of_mean writes to its argument", why=_WHY)
    single = np.asarray([metric.of_mean(mean) for mean in grid[0]])
    if not np.allclose(single, rows[0], rtol=_CLOSE, atol=_CLOSE):
        raise PluginError(f"{where}: of_mean of one mean depends on the other means", why=_WHY)
    if metric.per != "run" and (np.diff(rows[0]) < 0).any():
        raise PluginError(f"{where}: of_mean decreases",
                          why="intervals are taken of means and put through it")
    for name, mean in means.items():
        try:
            metric.summarize(np.stack([mean, mean]))
        except Exception as error:
            raise PluginError(f"{where}, window {name!r}: {reason_of(error)}", why=_WHY) from error
