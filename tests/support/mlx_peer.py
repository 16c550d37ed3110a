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


def mlx_logits(scratch: Path, model: Path, ids: np.ndarray, *, float32: bool = True) -> np.ndarray:
    """mlx-lm's logits ``[n, length, vocabulary]`` for token ids ``[n, length]``."""
    return ask_mlx(scratch, "logits", folder=str(model), ids=ids, float32=float32)["logits"]


def mlx_greedy(scratch: Path, model: Path, prompts: Sequence[Sequence[int]], tokens: int, *,
               float32: bool = True) -> list[list[int]]:
    """The likeliest tokens after each prompt."""
    return ask_mlx(scratch, "greedy", folder=str(model), prompts=json.dumps(prompts), tokens=tokens,
                   float32=float32)["tokens"].tolist()
