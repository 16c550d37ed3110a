"""Streams of tokens: together they are the whole text, and no piece ends in half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from quantkit.testing import VOCAB, tiny_tokenizer
from quantkit.text.tokenizer import MAX_HELD, StreamDecoder

BYTES = tiny_tokenizer()


def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama-2's kind: a mark for spaces, bytes for what isn't in the vocabulary."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{b:02X}>": b + 2 for b in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁ab", "é", "."):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁a", "b")], unk_token="<unk>",
                                     byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer


PIECES = sentencepiece()


def pieces_of(tokenizer, ids):
    stream = StreamDecoder(lambda some: tokenizer.decode(list(some), skip_special_tokens=True))
    return [stream.push(i) for i in ids] + [stream.finish()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", ["the cat and the hat", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦🏳️‍🌈 ok",
                                  "a\n\n\tb  c ", "é" * 200,
                                  "😀" * 60, "€😀é" * 40, ""])
def test_the_pieces_are_the_whole(tokenizer, text):
    pieces = pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=40))
def test_any_text(text):
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=MAX_HELD))
def test_any_bytes_even_broken_ones(ids):
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids)


def test_a_piece_comes_as_soon_as_it_is_certain():
    ids = BYTES.encode("a é€😀b", add_special_tokens=False).ids
    assert [p for p in pieces_of(BYTES, ids) if p] == ["a", " ", "é", "€", "😀", "b"]


def test_the_space_before_a_word_survives_a_special_token():
    ids = PIECES.encode("ab ab", add_special_tokens=False).ids
    assert "".join(pieces_of(PIECES, [ids[0], 1, 1, *ids[1:]])) == "ab ab"


def test_broken_bytes_are_not_held_for_ever():
    half = BYTES.encode("é", add_special_tokens=False).ids[0]
    stream = StreamDecoder(BYTES.decode)
    assert "".join(stream.push(half) for _ in range(MAX_HELD + 2)).count("\ufffd") >= MAX_HELD


def test_the_cost_of_a_token_doesnt_grow_with_the_text():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return BYTES.decode(list(ids))

    stream = StreamDecoder(decode)
    for token in BYTES.encode("the cat " * 300, add_special_tokens=False).ids:
        stream.push(token)
    assert longest <= 4


def test_finish_makes_it_new():
    stream = StreamDecoder(BYTES.decode)
    first, second = BYTES.encode("é", add_special_tokens=False).ids
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")
    assert (stream.push(first), stream.push(second)) == ("", "é")
