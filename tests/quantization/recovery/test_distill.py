"""The optimizer of ``distill``, on a task whose gradient is known."""

from __future__ import annotations

import pytest
import torch

from quantkit.quantization.recovery.base import Parameter
from quantkit.quantization.recovery.distill import RECOVERY, DistillOptions


class Quadratic:
    """Scales and norms that are best at twice their start; each gradient is exact."""

    def __init__(self, windows=8, stop=None):
        start = torch.tensor([[0.5], [2.0]])
        self.parameters = {"a.scale": Parameter("scale", start, start),
                           "norm.weight": Parameter("norm", torch.tensor([1.0, -3.0]),
                                                    torch.tensor([1.0, 3.0]))}
        self.windows, self.stop, self.state, self.told, self.asked = windows, stop, None, [], []

    def gradient(self, values, windows):
        if self.stop is not None and len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append(list(windows))
        off = {name: values[name] - 2 * parameter.start for name, parameter in self.parameters.items()}
        return sum(float(o.square().sum()) for o in off.values()), {name: 2 * o for name, o in off.items()}

    def saved(self):
        return self.state and {name: tensor.clone() for name, tensor in self.state.items()}

    def save(self, state):
        self.state = {name: tensor.clone() for name, tensor in state.items()}

    def tell(self, done, total):
        self.told.append((done, total))


def test_it_comes_to_the_best_values():
    task = Quadratic()
    values = RECOVERY.train(task, DistillOptions(steps=300, lr=0.05, norm_lr=0.05))
    for name, parameter in task.parameters.items():
        torch.testing.assert_close(values[name], 2 * parameter.start, rtol=0.02, atol=0.02)


def test_windows_are_taken_in_turn_once_by_default():
    task = Quadratic(windows=7)
    RECOVERY.train(task, DistillOptions(batch=2))  # the seventh is in no whole batch
    assert task.asked == [[0, 1], [2, 3], [4, 5]] and task.told == [(0, 3), (1, 3), (2, 3)]
    task = Quadratic(windows=3)
    RECOVERY.train(task, DistillOptions(batch=8, steps=2))
    assert task.asked == [[0, 1, 2], [0, 1, 2]]


def test_norms_stay_with_a_rate_of_0():
    task = Quadratic()
    values = RECOVERY.train(task, DistillOptions(norm_lr=0))
    assert torch.equal(values["norm.weight"], task.parameters["norm.weight"].start)
    assert not torch.equal(values["a.scale"], task.parameters["a.scale"].start)


@pytest.mark.parametrize("stop", [0, 3, 4, 7])
def test_it_goes_on_where_it_was_stopped(stop):
    expected = RECOVERY.train(Quadratic(), DistillOptions(steps=10))
    task = Quadratic(stop=stop)
    with pytest.raises(KeyboardInterrupt):
        RECOVERY.train(task, DistillOptions(steps=10))
    task.stop = None
    values = RECOVERY.train(task, DistillOptions(steps=10))
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert len(task.asked) == 10 + stop % 4
