"""What the scripts of this folder share: quantkit's command, and a model as every tool reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file

from quantkit.sources.open import open_source


def quantkit(*arguments: str, threads: int | None = None, fails: bool = False) -> str:
    """What a command of quantkit prints. Exits if it fails, unless it may."""
    env = dict(os.environ) if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", *arguments], capture_output=True,
                          text=True, check=False, env=env)
    if done.returncode and not fails:
        sys.exit(f"quantkit {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


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
