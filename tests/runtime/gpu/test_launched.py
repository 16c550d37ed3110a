"""What is launched compiles: whole models, with the arguments that a GPU would be given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KV = ("none,int8,fp8,int4,int3,int2,rotation(4),rotation(3),rotation(2),int8/int4,window(64, sinks=4)+int8,"
      "window(70)+int4,snapkv(0.5, window=16)+int4,h2o(96, interval=2),kvzip(0.5)+int4,tova(96, interval=2),"
      "expected(0.5),adakv(64)")
WEIGHTS = "none,int8,int4-rtn,nf4,nf4-nested,w8a8,fp8,nvfp4-a4,mxfp4-a4,trellis3"
MODELS = "gemma2,gemma3_text,mistral,phi3,qwen2,qwen3,qwen3_moe,gpt_oss"
NEEDED = {"embed_kernel", "rms_norm_kernel", "matmul_kernel", "rope_store_kernel", "tile_kernel",
          "split_kv_kernel", "reduce_kernel", "advance_kernel", "draw_kernel", "join_peaks_kernel",
          "dequantize_kernel", "gate_kernel"}


def launched(*arguments):
    """In a process of its own: in this one kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("launched.py")), *arguments],
                          env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["faults"]
    early = "--early" in arguments and "sm_80" not in arguments
    assert early == ("matmul_kernel" in found["early"])
    return found["launches"]


@pytest.mark.slow
def test_a_model():
    assert launched("--kv", "none,int4").keys() >= NEEDED


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("arguments", [
    ("--kv", KV), ("--recipe", WEIGHTS), ("--recipe", WEIGHTS, "--early"),
    ("--families", MODELS, "--kv", "int8")], ids=("kv", "weights", "early", "models"))
def test_all_models(arguments, target):
    found = launched(*arguments, "--target", target)
    assert found.keys() >= NEEDED
    if MODELS in arguments:
        assert found.keys() >= {"route_kernel", "order_kernel", "combine_kernel"}
    if KV in arguments:
        assert found.keys() >= {"close_pages_kernel", "weights_kernel", "rotate_kernel"}
    if WEIGHTS in arguments:
        assert found.keys() >= {"quantize_kernel", "round_groups_kernel"}
        assert ("block_scaled_kernel" in found) == (target == "sm_100")
