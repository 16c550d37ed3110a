"""Every registered metric keeps the promises of ``quantkit.evaluation.metrics.Metric``."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_metric


@pytest.mark.parametrize("name", sorted(registry("metrics")))
def test_registered_metrics(name: str) -> None:
    check_metric(registry("metrics").get(name))
