"""Finds the data that ships with quantkit: in a wheel under ``quantkit/_data``, else beside the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def data_dir(kind: Literal["recipes", "evals"]) -> Path:
    """The folder of shipped recipes or evaluation suites (it may not exist in an odd install)."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data" / kind
    return packaged if packaged.is_dir() else package.parent / kind
