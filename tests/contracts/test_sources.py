"""Registered sources keep the promises of ``sources/base.py``: those that need no network."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_source


@pytest.mark.parametrize(("name", "uri"), [("local", "{folder}"), ("synthetic", "synthetic:tiny?seed=1")])
def test_registered_sources(name: str, uri: str) -> None:
    check_source(registry("sources").get(name), uri)


def test_the_source_of_installed_packages(smollm2: str) -> None:
    check_source(registry("sources").get("package"), smollm2)
