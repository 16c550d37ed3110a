"""Every registered reporter keeps the promises of ``quantkit.evaluation.report.base.Reporter``."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_reporter


@pytest.mark.parametrize("name", sorted(registry("reporters")))
def test_registered_reporters(name: str) -> None:
    reporter = registry("reporters").get(name)
    assert reporter.name == name
    check_reporter(reporter)
