"""How a comparison was made, so that two numbers are compared only if they can be."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Protocol:
    """Everything that changes a number.

    Attributes:
        text, text_sha256: what was read.
        tokens_sha256: of the scored token ids; equal tokenizers give equal ones.
        window: tokens a window; windows follow one another without overlap, each starts afresh.
        windows: the first so many of the text.
        scored: predictions a model: ``windows * (window - 1)``; a window's first token is not one.
        bos: no BOS is put before a window.
        dtype: of activations: ``auto`` is each model's own.
        prefill, decode, repeats: prompt tokens, new tokens and timed runs of the speed test.
        quantkit, torch: versions.
        cpu, threads: the machine.
    """

    text: str
    text_sha256: str
    tokens_sha256: str
    window: int
    windows: int
    scored: int
    dtype: str
    prefill: int
    decode: int
    repeats: int
    quantkit: str
    torch: str
    cpu: str
    threads: int
    bos: str = "none"

    @property
    def fingerprint(self) -> str:
        """Of what decides quality; numbers with different fingerprints can't be compared."""
        quality = (self.text_sha256, self.tokens_sha256, self.window, self.windows, self.bos)
        return hashlib.sha256(json.dumps(quality).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the fingerprint included."""
        return {**asdict(self), "fingerprint": self.fingerprint}

    def lines(self) -> list[str]:
        """For people: what was measured, on what."""
        return [f"text {self.text} (sha256 {self.text_sha256[:12]}), {self.windows} windows of {self.window} "
                f"tokens, no overlap, no BOS, {self.scored} predictions",
                f"activations {self.dtype}; speed: {self.prefill} tokens in, {self.decode} out, "
                f"median of {self.repeats}, batch 1, a process a model",
                f"{self.cpu}, {self.threads} threads, torch {self.torch}, quantkit {self.quantkit}; "
                f"fingerprint {self.fingerprint}"]


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or f"{os.cpu_count()} cores"
