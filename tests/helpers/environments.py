"""New environments, and the command in them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(folder):
    """The python of a new environment, which finds what is installed here as if it were installed there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True,
                   timeout=120)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def install(python, *arguments):
    done = subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                           "--no-deps", *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def quantkit_in(python, names, *arguments, code=0):
    """The output of the command in an environment, with the plugins of these names and no others."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))),
           "QUANTKIT_PLUGINS": ",".join(names)}
    done = subprocess.run([str(python), "-m", "quantkit.cli.main", *map(str, arguments)], env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
