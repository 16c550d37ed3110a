"""Gemma 3 270M from its GGUF: the tokens, weights and predictions that transformers makes of the file."""

from __future__ import annotations

import pytest
import torch

from quantkit.evaluation.text import load_text
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
TEXTS = ("The quick brown fox.\n\n  Zwei Wörter, 3,141 and    spaces\tend.", "def f(x):\n\treturn x**2\n",
         "模型 <start_of_turn>user\nHi<end_of_turn>\n", "", " ", "\n\n\n\n", "<unused0><bos>",
         "a ▁ b  ▁▁  c▁d\n ▁\n")


@pytest.fixture(scope="module")
def file(gemma3):
    return open_source(gemma3).path


@torch.no_grad()
def test_weights_and_predictions(gemma3, file):
    """Over more tokens than the windows of its layers are wide."""
    source = open_source(gemma3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager").eval()
    weights = theirs.state_dict()
    for name in source.tensors():
        assert torch.equal(weights[name].bfloat16(), source.tensor(name)), name
        weights[name].copy_(source.tensor(name))
    ours = load(gemma3, dtype="float32")
    assert ours.fallback_reason is None
    ids = torch.tensor([ours.tokenizer.encode(load_text().content[:6000])[:1100]])
    assert ids.shape[1] == 1100 > 2 * source.config()["sliding_window"]
    wanted, got = theirs(ids).logits[0], ours.model(ids)[0]
    assert (wanted - got).abs().max() < 2e-3 * wanted.abs().max()
    assert (wanted.argmax(-1) == got.argmax(-1)).float().mean() > 0.999


def test_tokens(gemma3, file):
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load(gemma3).tokenizer
    for text in (*TEXTS, load_text().content[:20000]):
        assert ours.encode(text) == theirs(text)["input_ids"], text[:80]
