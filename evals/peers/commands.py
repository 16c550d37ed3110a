"""What the scripts of this folder share: quantkit's command, a model as every tool reads it, and the
environment of another tool's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file

from quantkit.sources.open import open_source


def quantkit(*arguments: str, fails: bool = False) -> str:
    """What a command of quantkit prints. Exits if it fails, unless it may."""
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", *arguments], capture_output=True,
                          text=True, check=False)
    if done.returncode and not fails:
        sys.exit(f"quantkit {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def without_pythonpath(**more: str) -> dict[str, str]:
    """Of a process in another environment, which must not find this one's packages, nor the hub."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1", **more}


def plain_folder(uri: str, folder: Path) -> None:
    """A model as transformers reads it: plain tensors, as the source yields them."""
    source = open_source(uri)
    folder.mkdir(exist_ok=True)
    for name, content in source.side_files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(source.config()), encoding="utf-8")
    save_file({name: source.tensor(name).clone() for name in source.tensors()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    source.close()
