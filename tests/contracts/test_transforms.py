"""Every registered transform keeps the promises of ``transforms/base.py``."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_transform


@pytest.mark.parametrize("name", sorted(registry("transforms")))
def test_registered_transforms(name: str) -> None:
    check_transform(registry("transforms").get(name))
