"""No text has fewer tokens than its length says."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quantkit.testing import tiny_tokenizer
from quantkit.text.length import UNICODE_FORMS, TokenLength, token_length

TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(
    "the and of 1 \n\t\x04éＡﷺ가\u1100\u1161\u11a8ǖu\u0308\u0304\U0001d41a▁<s>")), max_size=60)


def byte_level(*, normalizer=None, pre=None, without="", strips=False):
    made = tiny_tokenizer(adds_bos=False)
    if without:
        content = json.loads(made.to_str())
        content["model"]["vocab"] = {token: number for token, number in content["model"]["vocab"].items()
                                     if not set(token) & set(without)}
        content["model"]["merges"] = [pair for pair in content["model"]["merges"]
                                      if not set("".join(pair)) & set(without)]
        made = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre, made.pre_tokenizer])
    if strips:
        made.add_special_tokens([AddedToken("<mask>", rstrip=True)])
    return made


def sentencepiece(*, fallback=True, normalizer=None):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256 if fallback else 0)), "▁", *"abcdefgh",
              "ab", "▁ab",
              "▁abab"]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)},
                                [("a", "b"), ("▁", "ab"), ("▁ab", "ab")], unk_token="<unk>", fuse_unk=True,
                                byte_fallback=fallback))
    made.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.ByteFallback()
    return made


KEEPING = {
    "byte level": byte_level(), "digits": byte_level(pre=pre_tokenizers.Digits(True)),
    "split": byte_level(pre=pre_tokenizers.Split(Regex(r"\d"), "isolated")),
    "bytes that are no tokens": byte_level(without="Ąé1Ã"),
    "NFC": byte_level(normalizer=normalizers.NFC()), "NFKC": byte_level(normalizer=normalizers.NFKC()),
    "NFD, NFKD": byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.NFKD()])),
    "sentencepiece": sentencepiece(),
}
DROPPING = {
    "strip": byte_level(normalizer=normalizers.Strip()),
    "accents": byte_level(normalizer=normalizers.StripAccents()),
    "replace": byte_level(normalizer=normalizers.Replace("  ", " ")),
    "pattern": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "inside": byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "spaces": byte_level(pre=pre_tokenizers.WhitespaceSplit()),
    "removed": byte_level(pre=pre_tokenizers.Split(" ", "removed")),
    "swallowed": byte_level(strips=True), "unknown": sentencepiece(fallback=False),
    "words": Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "pieces": Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "unigram": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "form of a byte that is no token": byte_level(normalizer=normalizers.NFKC(), without="Ą"),
}


def length_of(tokenizer):
    return token_length(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("name", KEEPING)
def test_no_text_has_fewer_tokens(name):
    tokenizer, length = KEEPING[name], length_of(KEEPING[name])

    @given(TEXTS)
    def check(text):
        assert length.least(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()


@pytest.mark.parametrize("name", DROPPING)
def test_nothing_is_said_where_text_can_disappear(name):
    assert length_of(DROPPING[name]) is None


def test_a_long_text_has_many():
    for name, text in (("byte level", "1" * 10_000), ("NFC", "e\u0301" * 10_000), ("sentencepiece",
                                                                                   "x" * 10_000)):
        assert length_of(KEEPING[name]).least(text) > 100, name
    assert TokenLength(4).least("") == 0 and TokenLength(4).least("abcde") == 2
    assert length_of(KEEPING["bytes that are no tokens"]).least("\x04" * 1000) == 0


def test_unicode_forms_shorten_by_no_more():
    for number in range(0x110000):
        if 0xD800 <= number < 0xE000:
            continue
        letter = chr(number)
        size = len(letter.encode())
        for form in ("NFC", "NFKC", "NFD", "NFKD"):
            assert size <= UNICODE_FORMS * len(unicodedata.normalize(form, letter).encode())
        # what is composed of several, each of four bytes at most
        assert 4 * len(unicodedata.normalize("NFD", letter)) <= UNICODE_FORMS * size or size == 1
