"""Every built-in policy keeps what quantkit.kv.base promises."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_policy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(registry("kv_policies")))
def test_policy(name: str) -> None:
    check_policy(registry("kv_policies").get(name))


@pytest.mark.parametrize("name", ["snapkv", "window", "h2o"])
def test_with_a_budget_in_tokens(name: str) -> None:
    check_policy(registry("kv_policies").get(name), budget=100)
