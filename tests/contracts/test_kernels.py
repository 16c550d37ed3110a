"""Every registered kernel keeps the promises of ``ops/dispatch.py``; those of a CPU are run."""

import pytest

from quantkit.ops.cpu_machine import unavailable
from quantkit.plugins.manager import registry
from quantkit.testing import FORMAT_SPECS, check_kernel

FEW = [spec for spec in FORMAT_SPECS[::2] if spec.kind != "int" or spec.bits == 8 or spec.granularity.size]
"""For the reference, which takes every weight of every format: some of each kind."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(registry("kernels")))
def test_registered_kernels(name: str) -> None:
    taken = check_kernel(registry("kernels").get(name), FEW if name == "reference" else FORMAT_SPECS)
    if name == "reference" or (name.startswith("cpu-") and unavailable() is None):
        assert taken >= 5
