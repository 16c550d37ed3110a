"""Times of an engine's work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """Seconds and tokens: all prompts' prefill, and the decode steps. What a prompt waits for on a GPU while
    others decode there counts as the prompt's."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
