"""Every built-in KV codec keeps what quantkit.kv.base promises."""

import pytest

from quantkit.plugins.manager import registry
from quantkit.testing import check_codec


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(registry("kv_codecs")))
def test_codec(name: str) -> None:
    check_codec(registry("kv_codecs").get(name))
