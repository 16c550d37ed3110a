"""Chromium for tests of pages, as the machine has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium(playwright: Any) -> Iterator[Any]:
    """A browser that runs; the test is skipped where there is none.

    Args:
        playwright: the module ``playwright.sync_api``.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium: install your system's package chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program)
        yield browser
        browser.close()
