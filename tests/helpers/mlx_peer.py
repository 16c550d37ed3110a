"""Asks mlx and mlx-lm, which ``QUANTKIT_TEST_MLX`` names a Python interpreter of."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PYTHON = os.environ.get("QUANTKIT_TEST_MLX", "")
with_mlx = pytest.mark.skipif(not PYTHON, reason="QUANTKIT_TEST_MLX names no Python that has mlx and mlx-lm")
SCRIPT = Path(__file__).with_name("mlx_script.py")


def ask_mlx(scratch: Path, what: str, **job: Any) -> Mapping[str, np.ndarray]:
    """What the function ``what`` of ``mlx_script.py`` gives; files are left in the folder ``scratch``."""
    question, answer = scratch / f"{what}.job.npz", scratch / f"{what}.answer.npz"
    np.savez(question, what=what, **job)
    done = subprocess.run([PYTHON, str(SCRIPT), str(question), str(answer)], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-20_000:]
    with np.load(answer) as arrays:
        return dict(arrays)


def mlx_logits(scratch: Path, model: Path, ids: np.ndarray) -> np.ndarray:
    """mlx-lm's logits ``[n, length, vocabulary]`` for token ids ``[n, length]``, in float32."""
    return ask_mlx(scratch, "logits", folder=str(model), ids=ids)["logits"]


def mlx_greedy(scratch: Path, model: Path, texts: Sequence[str],
               count: int) -> tuple[list[list[int]], list[list[int]]]:
    """mlx-lm's tokens of each text, and the ``count`` likeliest ones after it, in float32."""
    answer = ask_mlx(scratch, "greedy", folder=str(model), texts=json.dumps(texts), tokens=count)
    return json.loads(str(answer["prompts"])), answer["tokens"].tolist()
