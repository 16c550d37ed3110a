"""Regular expressions in checkpoints that other tools wrote."""

from __future__ import annotations

import re

from quantkit.models.reader import ConfigReader
from quantkit.support import patterns


def compiled(config: ConfigReader, key: str, text: str) -> re.Pattern[str]:
    """``text`` as a pattern. Raises UnsupportedModelError: it is none, or a match may take long."""
    try:
        return patterns.compiled(text)
    except ValueError as error:
        raise config.wrong(key, text[:80], f"it {error}") from None
