"""What is measured on a borrowed GPU is said in commands that exist."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from quantkit.quantization.recipe import load_recipe
from quantkit.support.paths import data_dir
from tests.helpers.options import OPTIONS

ROOT = data_dir("evals").parent
LISTED = subprocess.run(["bash", str(ROOT / "evals" / "gpu_minutes.sh"), "--list"], capture_output=True,
                        text=True, check=True).stdout.splitlines()


def test_what_is_wanted_is_there():
    names = {line.partition(":")[0] for line in LISTED}
    assert {"ceilings", "attention", "decode-int8", "prompts", "serving", "ncu", "tests"} <= names


@pytest.mark.parametrize("line", LISTED, ids=lambda line: line.partition(":")[0])
def test_commands_and_their_options_exist(line):
    words = shlex.split(line.partition(" python3 ")[2])
    given = {word for word in words if word.startswith("--")}
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif words[:2] == ["-m", "quantkit.cli.main"]:
        assert given <= {name for path, option in OPTIONS if path in " ".join(words) for name in option.opts}
        recipe = words[words.index("--random") + 1]
        assert recipe == "none" or load_recipe(recipe)
    else:
        script = f"kernels/{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{option}"' in text for option in given)
