"""README's Python runs as it is written, and gives the model that quantkit runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

pytest.importorskip("transformers", reason="needs the extra oracle")
pytest.importorskip("compressed_tensors", reason="needs the extra oracle")
pytestmark = pytest.mark.oracle

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
NAMED = re.compile(r'"smollm2-([\w-]+)"')
"""A checkpoint's folder, called after its recipe."""


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: NAMED.search(block)[1])
def test_a_block_loads_what_quantkit_runs(block, tmp_path, monkeypatch):
    recipe = NAMED.search(block)[1]
    tiny_model(tmp_path / "smollm2", dtype="float32", hidden_size=128, intermediate_size=256)
    out = quantize(str(tmp_path / "smollm2"), recipe, tmp_path / f"smollm2-{recipe}").out
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block, "README.md", "exec"), names := {})
    tokens = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = names["model"].eval()(tokens).logits.float()
    ours = load(str(out), dtype="float32", device="cpu").model(tokens)
    assert theirs.std() > 0.5 and torch.equal(theirs.argmax(-1), ours.argmax(-1))


def test_it_shows_both_ways():
    assert [NAMED.search(block)[1] for block in BLOCKS] == ["int4", "int4-asym"]
    assert README.index("int4-asym`, are closer") < README.index("dequantize=True")
