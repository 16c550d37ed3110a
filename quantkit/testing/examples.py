"""Models for the checks of the built-in sources and architectures."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from quantkit.testing.tiny import tiny_model


def model_folder(folder: Path) -> str:
    """Make a tiny model's folder in an empty one; its uri."""
    return str(tiny_model(folder / "tiny"))


def synthetic_model(folder: Path) -> str:
    """The smallest that there is; nothing is written."""
    return "synthetic:tiny"


def family_config(family: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of a family. Raises UsageError for an unknown one."""
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = json.loads((tiny_model(folder, family) / "config.json").read_bytes())
        return config
