"""Rules by which text is cut: what each does, and the tokens that llama.cpp and the models' own tokenizers
make of the same texts."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from quantkit.evaluation.text import load_text
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.gguf_header import open_gguf
from quantkit.sources.gguf_pretokenizers import PRE_TOKENIZERS
from quantkit.sources.gguf_tokenizer import tokenizer_files
from tests.helpers.gguf_models import write_model

VOCABULARIES = os.environ.get("QUANTKIT_TEST_LLAMA_VOCABULARIES", "")
ADAPTED = ("tekken", "gpt-4o")
"""For these llama.cpp has other regular expressions than the models, which differ beyond ASCII."""
TEXTS = ("It's 2024, isn't it? I'LL see: 12345678 9 + 0x1F == y'all's $5.00 ~ `x`", "HelloWorld fooBAR",
         " leading, trailing  ", "a\n\n b\t\tc\r\n  d\n", "x = [1,2];\n\tif (a<=b) { return a/b; }  // k\n\n",
         "under_score--dash...!!! ???\n/path/to/file\n", "    four\n        eight", "(3.14)^2 = 9.8596 {o}\n")
UNICODE = ("naïve Äpfel нещо на Български", "日本語と中文，你好。我想在1314工作", "🚀 (normal) ½ ²³ Ⅷ",
           "नमस्ते । ۔ مرحبا، 123", "한국어 띄어쓰기 “quoted” ‘x’ …")


@pytest.mark.parametrize(("pre", "text", "wanted"), [
    ("gpt-2", "I'll pay 123, ok", ["I", "'ll", " pay", " 123", ",", " ok"]),
    ("smollm", "pay 123", ["pay", " ", "1", "2", "3"]),
    ("llama-bpe", "I'LL (pay) 12345", ["I", "'LL", " (", "pay", ")", " ", "123", "45"]),
    ("qwen2", "x\n\n  12", ["x", "\n\n", " ", " ", "1", "2"]),
    ("tekken", "fooBAR Baz/12's", ["foo", "BAR", " Baz", "/", "1", "2", "'s"]),
    ("gpt-4o", "fooBAR Baz/12's it's", ["foo", "BAR", " Baz", "/", "12", "'s", " it's"]),
    ("seed-coder", "a;\n12", ["a", ";", "\n", "1", "2"]), ("dbrx", "a;\n12", ["a", ";\n", "12"]),
    ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ("viking", "ja, nein 12", ["ja", ",", " nein", " ", "1", "2"]),
    ("deepseek-llm", "Hi 你好。\n12", ["Hi", " ", "你好", "。", "\n", "12"]),
    ("deepseek-coder", "f(x)\n12", ["f", "(", "x", ")", "\n", "1", "2"]),
])
def test_pieces(pre, text, wanted):
    pieces = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre].steps()).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == wanted


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_text_is_lost(pre):
    steps = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre].steps())
    for text in (*TEXTS, *UNICODE):
        spans = [span for _, span in steps.pre_tokenize_str(text)]
        assert "".join(text[begin:end] for begin, end in spans) == text


@pytest.fixture(scope="module")
def merges_across_cuts() -> tuple[list[str], list[str]]:
    """Tokens and merges of a BPE that was trained on text that wasn't cut: cuts show in the tokens then."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator([*TEXTS * 20, *UNICODE * 20, load_text().content[:60000]], trainer)
    model = json.loads(trained.to_str())["model"]
    assert len(model["vocab"]) > 2000
    return list(model["vocab"]), [" ".join(pair) for pair in model["merges"]]


def texts_for(pre: str) -> list[str]:
    """With mixtures of short pieces, in an order that is the same each time."""
    texts = [*TEXTS, *(() if pre in ADAPTED else UNICODE)]
    pieces = [" ", "  ", "\n", "\t", "'s", "'T", "12", "4567", "ab", "AbC", "!", "(", "$", "/", "_", "--"]
    chance = random.Random(pre)
    return [*texts, *("".join(chance.choices(pieces, k=12)) for _ in range(200))]


@pytest.mark.oracle
@pytest.mark.parametrize("pre", [pre for pre in PRE_TOKENIZERS if pre != "default"])
def test_llama_cpp_makes_the_same_tokens(tmp_path, llama_cpp, merges_across_cuts, pre):
    tokens, merges = merges_across_cuts

    def tokenizer(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    path = tmp_path / "m.gguf"
    write_model(path, "llama", tokenizer=tokenizer, vocab_size=len(tokens), num_hidden_layers=1)
    ours = Tokenizer.from_str(GGUFSource(path, "m.gguf").side_files()["tokenizer.json"].decode())
    with llama_cpp(path) as session:
        for text in texts_for(pre):
            ids = ours.encode(text, add_special_tokens=False).ids
            assert session.encode(text) == ids, (text, ours.encode(text).tokens)


@pytest.mark.skipif(not VOCABULARIES, reason="QUANTKIT_TEST_LLAMA_VOCABULARIES doesn't name the folder "
                                             "models of llama.cpp, which has ggml-vocab-*.gguf")
@pytest.mark.oracle
@pytest.mark.parametrize("name", ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2",
                                  "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder"])
def test_real_vocabularies_make_the_tokens_of_the_models_own_tokenizers(name):
    """llama.cpp's repository has texts beside vocabularies, and what transformers makes of them."""
    path = Path(VOCABULARIES) / f"ggml-vocab-{name}.gguf"
    metadata = open_gguf(path)[0].metadata
    rows = len(metadata["tokenizer.ggml.tokens"])
    ours = Tokenizer.from_str(tokenizer_files(metadata, path.name, rows)["tokenizer.json"].decode())
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) == len(wanted) > 40
    for text, ids in zip(texts, wanted):
        assert ours.encode(text, add_special_tokens=False).ids == [int(token) for token in ids.split()], text
