"""What the tests of several plugins need."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., CompletedProcess[bytes]]:
    """``command("eval", …)``: quantkit in a process of its own, where the plugin whose test asks is installed
    as its ``pyproject.toml`` says, and no other."""
    folder = request.path.parents[1]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    points: dict[str, str] = project["entry-points"]["quantkit"]
    about = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (about / "entry_points.txt").write_text(
        "\n".join(["[quantkit]", *(f"{name} = {module}" for name, module in points.items()), ""]))
    paths = map(str, (folder / "src", about.parent, ROOT, ROOT / "kernels"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "QUANTKIT_PLUGINS": ",".join(points)}

    def run(*arguments: object) -> CompletedProcess[bytes]:
        done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)], env=env,
                              capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        return done

    return run
