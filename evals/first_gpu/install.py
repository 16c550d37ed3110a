"""Install carried wheels that a machine lacks, and say what is missing: ``python install.py WHEELS FOLDER``.

Into a folder for ``PYTHONPATH``, without the network. What is installed already stays as it is, so that a
package's neighbors aren't exchanged. Exit code 1 if anything that quantkit can't do without is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

NEEDED = {"torch": "everything", "triton": "everything", "numpy": "everything", "safetensors": "models",
          "tokenizers": "models", "click": "the commands", "rich_click": "the commands",
          "pydantic": "the commands", "pluggy": "the commands", "ruamel.yaml": "the commands",
          "jinja2": "the commands", "huggingface_hub": "the commands", "gguf": "the model for on_gpu.py",
          "pytest": "the tests", "hypothesis": "the tests"}
"""Modules, and what can't be run without them."""
WANTED = {"xdist": "the tests run one after another", "llvmlite": "the CPU's side of on_gpu.py is torch",
          "scipy": "recipes with SmoothQuant or sparse methods fail", "fastapi": "the server's tests fail",
          "uvicorn": "the server's tests fail"}
"""Modules, and what happens without them."""


def install(wheels: Path, folder: Path) -> list[str]:
    """Install what isn't there; returns the names of those wheels."""
    absent = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            importlib.metadata.distribution(wheel.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            absent.append(wheel)
    if absent:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                        "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(folder),
                        *map(str, absent)], check=True)
    return [wheel.name for wheel in absent]


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print("installed:", ", ".join(install(args.wheels, args.folder)) or "nothing, all of it is there")
    sys.path.insert(0, str(args.folder))
    importlib.invalidate_caches()
    missing = False
    for name, use in (NEEDED | WANTED).items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing |= name in NEEDED
            print(f"MISSING {name}: {use if name in WANTED else f'needed for {use}'} ({error})")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
