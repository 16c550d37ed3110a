"""A comparison on a local Ray cluster, a worker of which is killed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.evaluation.run import evaluate
from tests.helpers.killed_worker import SETTINGS


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't installed")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="workers are found in Linux's /proc")
def test_a_killed_worker_costs_nothing(tiny, int8, int4, root):
    models = [str(tiny), str(int8), str(int4)]
    done = subprocess.run([sys.executable, "-m", "tests.helpers.killed_worker", *models], cwd=root,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["killed"] == 1, "no worker was found to be killed"
    alone = evaluate(models, SETTINGS).to_dict()
    for row in (*answer["result"]["results"], *alone["results"]):
        assert set(row.pop("measured")) == {"quality"}
    assert answer["result"]["results"] == json.loads(json.dumps(alone["results"]))
