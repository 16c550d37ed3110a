"""Every registered architecture keeps the promises of ``models/architecture.py``."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_architecture


@pytest.mark.parametrize("name", sorted(registry("architectures")))
def test_registered_architectures(name: str) -> None:
    check_architecture(registry("architectures").get(name))
