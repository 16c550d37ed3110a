"""The optimizer of ``distill``, on a loss whose gradient is known."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoint.writer import CheckpointWriter, WorkStore
from quantkit_recover.optimizer import DistillOptions, Parameter, saved_state, train


class Quadratic:
    """Scales and norms that are best at twice their start; each gradient is exact."""

    def __init__(self, store, windows=8):
        start = torch.tensor([[0.5], [2.0]])
        self.parameters = {"a.scale": Parameter("scale", start, start),
                           "norm.weight": Parameter("norm", torch.tensor([1.0, -3.0]),
                                                    torch.tensor([1.0, 3.0]))}
        self.store, self.windows = store, windows
        self.stop, self.told, self.asked = None, [], []

    def gradient(self, values, windows):
        if self.stop is not None and len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append(list(windows))
        return {name: 2 * (values[name] - 2 * parameter.start) for name, parameter in self.parameters.items()}

    def train(self, **options):
        return train(self.parameters, self.windows, DistillOptions(**options), self.store, self.gradient,
                     lambda done, total: self.told.append((done, total)))


@pytest.fixture
def stores(tmp_path):
    """Makes stores of runs, each its own."""
    with CheckpointWriter(tmp_path / "out", {}) as writer:
        numbers = iter(range(9))
        yield lambda: WorkStore(writer, f"run-{next(numbers)}")


def test_it_comes_to_the_best_values(stores):
    task = Quadratic(stores())
    values = task.train(steps=300, lr=0.05, norm_lr=0.05)
    for name, parameter in task.parameters.items():
        torch.testing.assert_close(values[name], 2 * parameter.start, rtol=0.02, atol=0.02)


def test_windows_are_taken_in_turn_once_by_default(stores):
    task = Quadratic(stores(), windows=7)
    task.train(batch=2)  # the seventh is in no whole batch
    assert task.asked == [[0, 1], [2, 3], [4, 5]] and task.told == [(0, 3), (1, 3), (2, 3)]
    task = Quadratic(stores(), windows=3)
    task.train(batch=8, steps=2)
    assert task.asked == [[0, 1, 2], [0, 1, 2]]


def test_norms_stay_with_a_rate_of_0(stores):
    task = Quadratic(stores())
    values = task.train(norm_lr=0)
    assert torch.equal(values["norm.weight"], task.parameters["norm.weight"].start)
    assert not torch.equal(values["a.scale"], task.parameters["a.scale"].start)


@pytest.mark.parametrize("stop", [0, 3, 4, 7, 9])
def test_it_goes_on_where_it_was_stopped(stores, stop):
    expected = Quadratic(stores()).train(steps=10)
    task = Quadratic(stores())
    task.stop = stop
    with pytest.raises(KeyboardInterrupt):
        task.train(steps=10)
    state = saved_state(task.store)
    assert (0 if state is None else int(state["step"])) == stop // 4 * 4, "of two states the newer one"
    task.stop = None
    values = task.train(steps=10)
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert len(task.asked) == 10 + stop % 4
