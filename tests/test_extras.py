"""Where the suite runs, every extra is installed: no test is left out because a package isn't there."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DEVELOPERS = {"dev", "oracle"}
"""What `make test` installs."""
PACKAGES = {re.match(r"[\w.-]+", line)[0] for lines in EXTRAS.values() for line in lines} - {"quantkit"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_of_an_extra_is_installed(package):
    assert importlib.metadata.version(package), "run: make test"


def test_make_installs_what_the_tests_need():
    (installed,) = re.findall(r"-e \"\.\[(.*?dev.*?)\]\"", (ROOT / "Makefile").read_text())
    assert set(installed.split(",")) == DEVELOPERS


def test_the_extras_of_users_are_among_those_of_developers():
    (line,) = [line for line in EXTRAS["dev"] if line.startswith("quantkit[")]
    named = set(line.removeprefix("quantkit[").removesuffix("]").split(","))
    assert named == set(EXTRAS) - DEVELOPERS
