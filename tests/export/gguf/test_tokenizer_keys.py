"""Tokenizers as GGUF has them: those of real files come back as they were; what GGUF can't say is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from quantkit.export.gguf.tokenizer_keys import pre_tokenizer_name, tokenizer_keys
from quantkit.sources.gguf_header import open_gguf
from quantkit.sources.gguf_pretokenizers import PRE_TOKENIZERS
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.sources.open import open_source
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing import tiny_tokenizer
from quantkit.text.tokenizer import Tokenizer
from tests.helpers.small_tokenizers import phi3_like, sentencepiece

TEXTS = ("Hello, world", "  two  spaces\tand\ttabs\n\n\nlines\r\n", "naïve Äpfel 日本語 🚀 ½ नमस्ते",
         "1234567 it's I'LL", "def f(x):\n    return x**2  # 你好\n", "<s>a</s> b<unk>",
         "\u200b\ufeff \u3000|")


def wrapped(library: Library, settings: dict | None = None, **generation) -> Tokenizer:
    if settings is None:
        settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer({"tokenizer.json": library.to_str().encode(),
                      "tokenizer_config.json": json.dumps(settings).encode(),
                      "generation_config.json": json.dumps(generation).encode()}, {})


def again(keys, size: int) -> Tokenizer:
    """The tokenizer that the keys describe."""
    return Tokenizer(tokenizer_files(keys.values, "m.gguf", size), {})


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_sentencepiece(prefix, bos, named):
    settings = {"eos_token": "</s>", "unk_token": "<unk>"} | ({"bos_token": "<s>"} if named else {})
    ours = wrapped(sentencepiece(prefix, bos=bos), settings)
    assert ours.encode("<s>a").count(1) == 1, "a text that begins with it gets no second one"
    keys = tokenizer_keys(ours, ours.vocab_size + 3)
    back = again(keys, ours.vocab_size + 3)
    assert [back.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    values = keys.values
    assert values["tokenizer.ggml.add_space_prefix"] is prefix
    assert values["tokenizer.ggml.add_bos_token"] is bos and keys.notes == ()
    types = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]))
    assert [types[token] for token in ("<unk>", "<s>", "<0x41>", "▁the")] == [2, 3, 6, 1]
    assert list(types)[-3:] == [f"[PAD{ours.vocab_size + i}]" for i in range(3)]
    assert set(list(types.values())[-3:]) == {5}
    scores = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]))
    assert scores["▁t"] > scores["he"] > scores["▁hello"] > scores["a"]


def test_byte_level():
    ours = wrapped(tiny_tokenizer(), {"bos_token": "<s>", "eos_token": "<|im_end|>",
                                      "pad_token": "<|endoftext|>", "chat_template": "{{ messages }}"},
                   eos_token_id=[3, 0])
    keys = tokenizer_keys(ours, 300)
    back = again(keys, 300)
    assert [back.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert back.eos_ids == ours.eos_ids and back.template_text == ours.template_text
    names = ("eos_token_id", "eot_token_id", "padding_token_id", "bos_token_id", "pre", "model")
    assert [keys.values[f"tokenizer.ggml.{name}"] for name in names] == [3, 0, 0, 1, "gpt-2", "gpt2"]


@pytest.mark.parametrize("pre", sorted(set(PRE_TOKENIZERS) - {"default"}))
def test_a_rule_gets_its_name_or_that_of_an_equal_one(pre):
    rule = PRE_TOKENIZERS[pre]
    library = Library(models.BPE(ignore_merges=rule.ignore_merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(rule.steps())
    if rule.nfc:
        library.normalizer = normalizers.NFC()
    assert PRE_TOKENIZERS[pre_tokenizer_name(json.loads(library.to_str()))].patterns == rule.patterns


def test_normalization_alone_does_not_matter():
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS["qwen2"].steps())
    assert pre_tokenizer_name(json.loads(library.to_str())) == "qwen2"  # llama.cpp normalizes nothing


def changed(**parts) -> Library:
    library = tiny_tokenizer()
    for name, value in parts.items():
        setattr(library, name, value)
    return library


def with_model(model) -> Library:
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


@pytest.mark.parametrize(("library", "words"), [
    (Library(models.WordLevel({"a": 0}, unk_token="a")), "WordLevel"),
    (Library(models.Unigram([("a", -1.0)], unk_id=0)), "Unigram"),
    (Library(models.BPE({"a": 0}, [])), "neither"),
    (with_model(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")), "end_of_word_suffix"),
    (changed(normalizer=normalizers.NFKC()), "NFKC"),
    (changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "add_prefix_space"),
    (changed(pre_tokenizer=pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d{7}"), "isolated"), pre_tokenizers.ByteLevel(False)])), "named ones"),
    (changed(pre_tokenizer=pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])), "Whitespace"),
    (changed(post_processor=processors.TemplateProcessing(
        single="<s> <s> $A", special_tokens=[("<s>", 1)])), "without special tokens"),
    (changed(post_processor=processors.TemplateProcessing(
        single="$A <s>", special_tokens=[("<s>", 1)])), "behind every text"),
    (sentencepiece(drop="<0x41>"), "<0x41>"),
    (sentencepiece(merges=[("▁", "t"), ("h", "e")]), "aren't merged"),
    (sentencepiece(merges=[("▁t", "he"), ("h", "e"), ("▁th", "e")]), "don't follow"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_gguf_can_not_say_is_refused(library, words):
    settings = {} if "behind" not in words else {"eos_token": "<|im_end|>"}
    ours = wrapped(library, settings)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        tokenizer_keys(ours, 1000)
    assert "no tokenizer that is this model's" in caught.value.what and caught.value.next


def test_tokens_need_rows_and_names_of_their_own():
    with pytest.raises(UnsupportedModelError, match="token 299 has no row"):
        tokenizer_keys(wrapped(tiny_tokenizer(), {}), 299)
    library = tiny_tokenizer()
    library.add_tokens(["[PAD301]"])
    with pytest.raises(UnsupportedModelError, match="would stand twice"):
        tokenizer_keys(wrapped(library, {}), 310)


def test_metaspace_in_place_of_normalizers():
    for scheme, prefix, notes in (("always", True, 0), ("first", True, 1), ("never", False, 0)):
        library = sentencepiece()
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        keys = tokenizer_keys(wrapped(library), library.get_vocab_size())
        assert keys.values["tokenizer.ggml.add_space_prefix"] is prefix and len(keys.notes) == notes


def test_users_tokens_are_texts_with_spaces():
    library = sentencepiece(prefix=False)
    library.add_tokens([AddedToken("▁▁▁", normalized=True), AddedToken("<think>", normalized=False)])
    keys = tokenizer_keys(wrapped(library), library.get_vocab_size())
    assert keys.values["tokenizer.ggml.tokens"][-2:] == ["   ", "<think>"]
    assert keys.values["tokenizer.ggml.token_type"][-2:] == [4, 4]


def stripping(*texts: str) -> Library:
    library = tiny_tokenizer()
    library.add_special_tokens([AddedToken(text, special=True, rstrip=text in texts)
                                for text in ("<unk>", "<|user|>", "<|end|>")])
    return library


def test_tokens_that_take_space_away():
    keys = tokenizer_keys(wrapped(stripping("<|user|>"), {}), 400)
    assert not keys.strips_space and "<|user|> is kept" in keys.notes[0]
    library = phi3_like()
    keys = tokenizer_keys(wrapped(library, {}), library.get_vocab_size())
    assert keys.strips_space and keys.notes == ()


def test_more_ends_than_keys():
    keys = tokenizer_keys(wrapped(tiny_tokenizer(), {"eos_token": "<|im_end|>"}, eos_token_id=[0, 2, 7]), 300)
    assert [keys.values[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [3, 0, 2]
    assert len(keys.notes) == 1


def test_ends_that_are_no_tokens_are_left_out():
    keys = tokenizer_keys(wrapped(tiny_tokenizer(), {}, eos_token_id=[-1, 2**40, 7]), 300)
    assert keys.values["tokenizer.ggml.eos_token_id"] == 7
    assert "tokenizer.ggml.eot_token_id" not in keys.values


def same_as_the_file(uri: str, path: Path) -> None:
    source = open_source(uri)
    keys = tokenizer_keys(Tokenizer(source.side_files(), source.config()), source.config()["vocab_size"])
    metadata = open_gguf(path)[0].metadata
    types = metadata["tokenizer.ggml.token_type"]
    for key, value in keys.values.items():
        stored = metadata.get(key)
        if key == "tokenizer.ggml.scores":
            merged = [number for number, score in enumerate(value) if score > min(value)]
            assert len(merged) > 200_000
            assert [value[number] for number in merged] == [stored[number] for number in merged]
        elif key == "tokenizer.ggml.token_type":
            assert [(number, a, b) for number, (a, b) in enumerate(zip(types, value)) if a != b] in (
                [], [(metadata["tokenizer.ggml.unknown_token_id"], 3, 2)])
        elif key in metadata:
            assert value == stored, key


def test_smollm2_is_as_llama_cpp_wrote_it(smollm2):
    source = open_source(smollm2)
    same_as_the_file(smollm2, source.path)


@pytest.mark.slow
def test_gemma_is_as_llama_cpp_wrote_it(gemma3):
    source = open_source(gemma3)
    same_as_the_file(gemma3, source.path)
