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

    def add(self, reads: bool, prompt_tokens: int, decoded: int, seconds: float) -> None:
        """Add a step, shared out by tokens where it had both kinds.

        Args:
            reads: whether it took prompts further.
            prompt_tokens, decoded: tokens of prompts, and of answers.
            seconds: that it took.
        """
        share = prompt_tokens / ((prompt_tokens + decoded) or 1) if decoded else float(reads)
        self.prefill_tokens += prompt_tokens
        self.prefill_s += share * seconds
        self.decode_tokens += decoded
        self.decode_s += (1 - share) * seconds
