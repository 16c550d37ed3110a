"""Every registered recovery keeps the promises of ``recover/base.py``, and the check finds what doesn't."""

from dataclasses import replace

import pytest
import torch

from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing import check_recovery


@pytest.mark.parametrize("name", sorted(registry("recoveries")))
def test_registered_recoveries(name: str) -> None:
    check_recovery(registry("recoveries").get(name))


def writing(task, options):
    for parameter in task.parameters.values():
        parameter.start.mul_(1.01)
    return {}


def forgetful(task, options):
    """It saves where it is, and not what it has."""
    steps = int((task.saved() or {"step": torch.tensor(0)})["step"])
    values = {name: parameter.start for name, parameter in task.parameters.items()}
    for step in range(steps, 6):
        _, gradients = task.gradient(values, [step])
        values = {name: value - 1e-3 * gradients[name] for name, value in values.items()}
        task.save({"step": torch.tensor(step + 1)})
    return values


@pytest.mark.parametrize(("train", "words"), [
    (writing, "writes to"), (forgetful, "stopped and started again"),
    (lambda task, options: {}, "isn't lower"), (lambda task, options: None, "NoneType"),
    (lambda task, options: {"a": torch.ones(1)}, "no parameter")])
def test_broken_promises(train, words):
    with pytest.raises(PluginError, match=words):
        check_recovery(replace(registry("recoveries").get("distill"), train=train))
