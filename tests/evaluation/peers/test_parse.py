"""How a peer is written."""

import pytest

from quantkit.evaluation.peers.openai_peer import OpenAIPeer
from quantkit.evaluation.peers.process import LlamaPeer, TransformersPeer
from quantkit.evaluation.peers.run import parse_peer
from quantkit.support.errors import UsageError


def test_each_kind_is_read_with_its_options():
    assert parse_peer("transformers(some/folder, quantization=bitsandbytes-nf4)") == TransformersPeer(
        path="some/folder", quantization="bitsandbytes-nf4")
    assert parse_peer("llama.cpp(m.Q8_0.gguf, bin=/opt/llama)") == LlamaPeer(
        file="m.Q8_0.gguf", bin="/opt/llama")
    assert parse_peer("openai(http://127.0.0.1:8000/v1, model=mine)") == OpenAIPeer(
        url="http://127.0.0.1:8000/v1", model="mine")


def test_a_path_with_commas_and_parentheses_stands_in_quotes():
    assert parse_peer('llama.cpp("models (old), v1/m.gguf")').uri == "models (old), v1/m.gguf"


@pytest.mark.parametrize(("text", "words"), [
    ("llamacpp(m.gguf)", "did you mean"), ("transformers", "path"),
    ("transformers(m, quantization=gptq)", "quantization"), ("llama.cpp(m.gguf, ctx=5)", "no option 'ctx'"),
    ("openai(http://a, timeout=-1)", "timeout"), ("transformers(m, device=tpu)", "device"),
    ("transformers(m", "can't be read"), ("x" * 3000, "3000 characters")])
def test_what_is_off_is_said(text, words):
    with pytest.raises(UsageError) as caught:
        parse_peer(text)
    assert words in str(caught.value)
