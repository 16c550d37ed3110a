"""What a loaded model takes: its weights once, packed, whatever was read of the file on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model

RUN = """
import json, re, sys
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\\s+(\\d+)", file.read()).group(1)) * 1024

def run(model):
    loaded = load(model)
    after = status("VmHWM")
    generate(loaded, [list(range(4, 36))], Sampling(max_tokens=8, ignore_eos=True))
    return loaded.file_bytes, after, status("VmHWM")

run(sys.argv[1])  # whatever is imported and compiled once
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
file, load, used = run(sys.argv[2])
print(json.dumps({"file": file, "load": load - before, "use": used - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "nf4"])
def test_the_peak_is_little_more_than_the_file(tmp_path, recipe):
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 16000,
             "num_attention_heads": 32, "num_key_value_heads": 8}
    for name, overrides in (("small", {}), ("large", shape)):
        source = tiny_model(tmp_path / f"{name}-bf16", **overrides)
        quantize(str(source), recipe, tmp_path / name)
    found = json.loads(subprocess.run([sys.executable, "-c", RUN, tmp_path / "small", tmp_path / "large"],
                                      check=True, capture_output=True, text=True).stdout)
    assert found["file"] > 200e6
    # the largest matrix, the embedding, is unpacked to a byte a weight before it is packed for the kernel
    codes = 0 if recipe == "int8" else shape["vocab_size"] * shape["hidden_size"]
    assert max(found["load"], found["use"]) <= 1.15 * found["file"] + codes, found
