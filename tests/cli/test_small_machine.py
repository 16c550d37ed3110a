"""A model is quantized, compared and run in little memory: as on a machine that has no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="limits on memory are POSIX")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux",
                                                   reason="only Linux's limit counts all private memory")]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
from quantkit.cli.main import main
sys.argv = ["quantkit", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(("model", "limit"), [("smollm2", 1.25e9), ("qwen", 4.75e9)])
def test_quantize_eval_and_generate(request, tmp_path, model, limit):
    """What is left of 8 GB beside a desktop is enough for 1.5 billion parameters whose file is decoded."""
    uri, out = request.getfixturevalue(model), str(tmp_path / "int4")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "2")  # each has a stack
    for command in (("quantize", uri, "--recipe", "int4-rtn", "--out", out),
                    ("eval", uri, out, "--windows", "2", "--window", "256", "--no-speed"),
                    ("generate", uri, "1, 2, 3,", "--max-tokens", "3"),
                    ("generate", out, "1, 2, 3,", "--max-tokens", "3")):
        run = subprocess.run([sys.executable, "-c", LIMITED, str(int(limit)), *command, "--quiet"],
                             env=os.environ | threads, capture_output=True, text=True,
                             cwd=Path(__file__).parents[2])
        assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout
