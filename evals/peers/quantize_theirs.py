"""Other tools' quantizers on one model: the weights that their codes stand for, as model folders.

    python evals/peers/quantize_theirs.py --model smollm2 --calibration wiki.valid.raw --work DIR \\
        --python hqq=PATH sinq=PATH llmcompressor=PATH gptqmodel=PATH autoround=PATH [--only 'hqq*']
    quantkit eval DIR/plain DIR/hqq-int4 DIR/sinq-int4 OUT --dtype float32 --text FILE --no-speed

The second command compares them with DIR/plain, the unquantized model, and with checkpoints of ours; what
another tool runs by itself (llama.cpp, transformers with bitsandbytes or torchao) is a ``--peer`` there.

An environment for each tool, all with the same torch (here its CPU build):

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 hqq transformers accelerate
    …                                         torch==2.13.0 numpy scipy termcolor safetensors
    …                                         --no-deps sinq             (in the one before)
    …                                         torch==2.13.0 llmcompressor
    …                                         gptqmodel transformers optimum accelerate  (its own torch)
    …                                         torch==2.13.0 auto-round

Linear layers only: embeddings and head stay as they are. Calibrated variants get the very token ids that
``quantkit quantize --calibration`` takes, but for those named ``default``, which get the text that the tool
takes if none is named (most have no such text, and say so). DIR/NAME.json has the bits that a weight takes on
disk, the tool's settings and versions, and the CPU minutes, user and system, of its process and its children.
What is there isn't made again; what failed is.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import plain_folder, without_pythonpath
from safetensors.torch import save_file

from quantkit.evaluation.protocol import cpu_name
from quantkit.models.architecture import parse_config
from quantkit.quantization.calibration.data import load_calibration
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.sources.local import LocalSource
from quantkit.text.tokenizer import Tokenizer

SCRIPT = Path(__file__).parent / "theirs" / "weights.py"
TOOLS = ("hqq", "sinq", "llmcompressor", "gptqmodel", "autoround")
NONE = "none"
DEFAULT = "default"
NEAR = "near"
LIGHT = {"iters": 50, "lr": 5e-3}  # AutoRound's own setting for those who are in a hurry
ROTATIONS = {"opt_rotation_epochs": 2, "opt_finetune_epochs": 2, "opt_train_samples": 512}
"""ParoQuant with a tenth of its steps: with all of them a CPU needs hours."""
GRIDS = ((4, False), (3, False), (2, False), (8, True), (4, True))
"""Bits, and whether the grid is symmetric."""


@dataclass(frozen=True)
class PeerVariant:
    """One way to quantize, by one tool; ``calibration`` is ``none``, ``default`` or ``near``."""

    tool: str
    name: str
    calibration: str
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of its files."""
        return f"{self.tool}-{self.name}".replace(" ", "-")


def variants(group: int) -> list[PeerVariant]:
    """The tools' methods, quick ones first, with a scale a row where ``group`` is -1."""
    def variant(tool: str, label: str, bits: int, calibration: str, symmetric: bool = True,
                **options: Any) -> PeerVariant:
        words = [label, f"int{bits}", "" if symmetric else "asym", DEFAULT * (calibration == DEFAULT)]
        return PeerVariant(tool, " ".join(filter(None, words)), calibration,
                           {"bits": bits, "group": group, "symmetric": symmetric, **options})

    sinq = "sinq" if group > 0 else "sinq_dual"  # 8-bit scales, which need 32 of them a layer, or float16
    everything = [variant("hqq", "", bits, NONE) for bits in (8, 4, 3, 2)]
    everything += [variant("sinq", "", bits, NONE, method=sinq) for bits in (8, 4, 3, 2)]
    everything.append(PeerVariant("sinq", "nf4", NONE, {"bits": 4, "group": group, "method": "sinq_nf4"}))
    everything += [variant("autoround", "rtn", bits, NONE, symmetric, iters=0, plain=True)
                   for bits, symmetric in ((8, True), (4, False), (3, False), (2, False))]
    everything.append(variant("gptqmodel", "rtn", 4, NONE, method="rtn"))
    everything += [variant("llmcompressor", "gptq", 4, DEFAULT, method="gptq"),
                   variant("llmcompressor", "awq", 4, DEFAULT, method="awq"),
                   variant("gptqmodel", "gptq", 4, DEFAULT, method="gptq"),
                   variant("autoround", "light", 4, DEFAULT, **LIGHT)]
    everything += [variant("llmcompressor", "gptq", bits, NEAR, symmetric, method="gptq")
                   for bits, symmetric in GRIDS]
    everything += [variant("gptqmodel", method, bits, NEAR, method=method)
                   for bits in (4, 3, 2) for method in ("gptq", "gptaq", "foem")]
    everything.append(variant("gptqmodel", "gptq", 8, NEAR, method="gptq"))
    everything.append(variant("llmcompressor", "awq", 4, NEAR, False, method="awq"))
    everything += [variant("autoround", "light", bits, NEAR, symmetric, **LIGHT) for bits, symmetric in GRIDS]
    everything.append(variant("llmcompressor", "autoround", 4, NEAR, False, method="autoround",
                              iters=LIGHT["iters"]))
    everything += [variant("gptqmodel", name, 4, NEAR, method="paroquant", options=options)
                   for name, options in (("paroquant light", ROTATIONS), ("paroquant", {}))]
    return [*everything, *(variant("autoround", "tuned", 4, NEAR, symmetric) for symmetric in (False, True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where everything is made; it is kept")
    parser.add_argument("--python", nargs="*", default=[], metavar="TOOL=PATH",
                        help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="of 'tool-name'")
    parser.add_argument("--group", type=int, default=64, help="weights a scale; -1: a row")
    parser.add_argument("--windows", type=int, default=64, help="of the calibration's text")
    parser.add_argument("--window", type=int, default=512, help="tokens of each")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    pythons = {tool: Path(path).absolute() for tool, path in (pair.split("=", 1) for pair in args.python)}
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    plain, tokens = work / "plain", work / "calibration.safetensors"
    if not plain.exists():
        plain_folder(args.model, plain)
    if not tokens.exists():
        source = LocalSource(plain, str(plain))
        tokenizer = Tokenizer(source.side_files(), source.config())
        spec = CalibrationSpec(text=str(args.calibration), windows=args.windows, window=args.window)
        size = parse_config(source.config()).vocab_size
        save_file({"tokens": load_calibration(spec, tokenizer, size, 1).tokens}, tokens)
    for variant in variants(args.group):
        wanted = any(fnmatch.fnmatch(variant.key, pattern) for pattern in args.only)
        if wanted and variant.tool in pythons and not (work / variant.key).exists():
            print(f"{variant.key}: {make(variant, pythons[variant.tool], work, args.threads)}", flush=True)


def make(variant: PeerVariant, python: Path, work: Path, threads: int) -> str:
    """Run the tool and keep what it says of itself; returns that in words."""
    out = work / variant.key
    env = without_pythonpath(OMP_NUM_THREADS=str(threads), CUDA_VISIBLE_DEVICES="")
    tokens = str(work / "calibration.safetensors") if variant.calibration == NEAR else "-"
    command = [str(python), str(SCRIPT), str(work / "plain"), tokens, str(out),
               json.dumps({"tool": variant.tool, **variant.spec})]
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env,
                          cwd=work)  # some write logs where they run
    after = os.times()
    facts: dict[str, Any] = {
        "tool": variant.tool, "name": variant.name, "calibration": variant.calibration, "cpu": cpu_name(),
        "wall_s": time.perf_counter() - begin,
        "cpu_s": after.children_user + after.children_system - before.children_user - before.children_system}
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "killed").splitlines()
        last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        facts["failed"] = last.replace(f"{work}/", "")[:300]  # a result names no folders
        (work / f"{variant.key}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    else:
        line = next(line for line in done.stdout.splitlines() if line.startswith("made "))
        facts |= json.loads(line.removeprefix("made "))
    (work / f"{variant.key}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return (f"not made: {facts['failed']}" if done.returncode else
            f"{facts['bits_per_weight']:.2f} bits/weight, {facts['cpu_s'] / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
