"""Every registered format keeps the promises of ``formats/base.py``."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_format


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(registry("formats")))
def test_registered_formats(name: str) -> None:
    check_format(registry("formats").get(name))
