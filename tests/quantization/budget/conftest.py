"""What is measured is kept in a folder of the test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder of sensitivities."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sensitivity"
