"""README's Python runs as it is written, and gives the model that quantkit runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from quantkit.export.layouts import export
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

pytest.importorskip("transformers", reason="needs the extra oracle")
pytest.importorskip("compressed_tensors", reason="needs the extra oracle")
pytestmark = pytest.mark.oracle

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCK, = (block for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
          if "AutoModelForCausalLM" in block)
FOLDER = "smollm2-int4-hf"
"""What the command before the block makes."""


def test_the_block_loads_what_quantkit_runs(tmp_path, monkeypatch):
    assert README.index(f"--for transformers {FOLDER}\n") < README.index(BLOCK)
    tiny_model(tmp_path / "smollm2", dtype="float32", hidden_size=128, intermediate_size=256)
    first = quantize(str(tmp_path / "smollm2"), "int4", tmp_path / "smollm2-int4").out
    out = export(str(first), "pack-quantized", tmp_path / FOLDER, engine="transformers")
    assert out.decoded == ("model.embed_tokens",)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(BLOCK, "README.md", "exec"), names := {})
    tokens = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = names["model"].eval()(tokens).logits.float()
    ours = load(str(out.out), dtype="float32", device="cpu").model(tokens)
    assert theirs.std() > 0.5 and torch.equal(theirs.argmax(-1), ours.argmax(-1))
    before = load(str(first), dtype="float32", device="cpu").model(tokens)
    assert torch.equal(before.argmax(-1), ours.argmax(-1))
