"""Records how a comparison was made, so that only comparable numbers are compared."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.ops import cpu_machine
from quantkit.support.device import gpu_name


@dataclass(frozen=True)
class Protocol:
    """Everything that changes a number.

    Attributes:
        text, text_sha256: what was read.
        tokens_sha256: the hash of the scored token ids; equal tokenizers give equal ones.
        window, stride: tokens a window, and from one's start to the next's: they never overlap, and
            each starts afresh.
        windows: the number of windows that are used, from the text's beginning.
        prompt: tokens of a window that go through the KV cache as its prompt, and aren't scored; the
            rest reads what decoding would. ``None``: no cache was involved, all is scored.
        scored: predictions a model: ``windows * (window - 1 - prompt)``; a window's first token is not one.
        words: whitespace-separated words in the windows, for the perplexity a word.
        tasks: the names of the tasks, with their numbers of items.
        bos: ``first``: a window's first token gave its place to the BOS that the tokenizer puts in front of
            texts; ``none``: it puts none.
        dtype: the dtype of activations; several names if models differ, the reference's first.
        batch: windows that go through a model at once, and prompts in the speed test.
        seed: the seed of the bootstrap.
        prefill, decode, repeats: prompt tokens, new tokens and timed runs of the speed test, as asked for; 0
            if speed was not measured.
        block: tokens of a block, of models that write blocks: they predict tokens that are masked, and their
            perplexity is a bound (:mod:`~quantkit.evaluation.quality.blocks`).
        runs: the fewest and the most timed runs that a model really had; 0: no speed is shown, because the
            machine was busy; ``None``: not known.
        quantkit, torch: versions.
        cpu, cores, threads: the machine, and how many threads torch was given.
        gpu: the GPU that the models ran on; ``None``: on none.
        texts: of several texts each one's name in reports, its own name, sha256 and windows; then ``text``
            names all, and the hashes are of all hashes.
    """

    text: str
    text_sha256: str
    tokens_sha256: str
    window: int
    windows: int
    words: int
    dtype: str
    prefill: int
    decode: int
    repeats: int
    quantkit: str
    torch: str
    cpu: str
    cores: int
    threads: int
    prompt: int | None = None
    tasks: str = ""
    bos: str = "none"
    batch: int = 1
    seed: int = 0
    gpu: str | None = None
    texts: tuple[tuple[str, str, str, int], ...] = ()
    runs: tuple[int, int] | None = None
    block: int | None = None

    @property
    def stride(self) -> int:
        """Equal to the window: no overlap."""
        return self.window

    @property
    def scored(self) -> int:
        """Predictions that each model was scored on."""
        return self.windows * (self.window - 1 - (self.prompt or 0))

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides quality. Compare only numbers with equal fingerprints."""
        return hashlib.sha256(json.dumps(list(self.quality.values())).encode()).hexdigest()[:12]

    @property
    def quality(self) -> dict[str, object]:
        """Everything that decides quality, by name: what the fingerprint is made from."""
        names = ("text_sha256", "tokens_sha256", "window", "stride", "windows", "bos", "dtype")
        set_ones = tuple(name for name in ("prompt", "block") if getattr(self, name) is not None)
        return {name: getattr(self, name) for name in names + set_ones}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with what follows from it."""
        return {**asdict(self), "stride": self.stride, "scored": self.scored, "fingerprint": self.fingerprint}

    def lines(self) -> list[str]:
        """Lines for a report: what was measured, and on which machine."""
        fewest, highest = self.runs or (self.repeats, self.repeats)
        runs = f"{fewest} to {highest} runs" if fewest < highest else f"{highest} run{'s' * (highest > 1)}"
        speed = (f"speed: {self.prefill} tokens in, {self.decode} out, median of {runs}, "
                 f"batch {self.batch}, a process a model" if self.repeats and highest else
                 "speed was not measured" if not self.repeats else "no speed is shown")
        cached = f" after a prompt of {self.prompt} tokens in the KV cache" if self.prompt else ""
        tasks = [f"tasks {self.tasks}"] if self.tasks else []
        gpu = f"{self.gpu}; " if self.gpu else ""
        bos = "no BOS" if self.bos == "none" else "a BOS each"
        several = [f"text {name}: {text} (sha256 {digest[:12]}), {windows} windows"
                   for name, text, digest, windows in self.texts]
        masked = [] if self.block is None else [
            f"blocks of {self.block}: each token is predicted where it is masked, and perplexity is an upper "
            "bound"]
        return [*several, f"{f'{len(self.texts)} texts' if self.texts else f'text {self.text}'} "
                f"(sha256 {self.text_sha256[:12]}), {self.windows} windows of {self.window} "
                f"tokens, no overlap, {bos}, {self.scored} predictions{cached}", *masked, *tasks,
                f"activations {self.dtype}; {speed}",
                f"{gpu}{self.cpu}, {self.cores} cores, {self.threads} threads, torch {self.torch}, "
                f"quantkit {self.quantkit}; fingerprint {self.fingerprint}"]


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def cpu_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """CPU, cores, threads, instruction set, the GPU if that is the device, versions and the date."""
    available = cpu_machine.reason_against_kernels() is None
    return {"cpu": cpu_name(), "gpu": None if device is None else gpu_name(device), "cores": cpu_cores(),
            "threads": cpu_machine.pool().threads if available else torch.get_num_threads(),
            "isa": cpu_machine.isa().name if available else None, "torch": torch.__version__,
            "quantkit": __version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
