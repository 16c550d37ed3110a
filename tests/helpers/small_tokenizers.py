"""Small tokenizers of the kinds that real models have."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("▁t", "he", "▁the", "▁a", "in", "▁in", "er", "▁th", "hel", "▁hel", "lo", "▁hello")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz▁")


def sentencepiece(prefix: bool = True, merges=None, bos: bool = True, drop: str = "") -> Tokenizer:
    """BPE with byte fallback as transformers makes it of a SentencePiece model."""
    letters = sorted(set("".join(WORDS)) | _LETTERS)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *letters, *WORDS]
    vocab = {piece: number for number, piece in enumerate(piece for piece in pieces if piece != drop)}
    if merges is None:
        merges = [(word[:cut], word[cut:]) for word in WORDS for cut in range(1, len(word))
                  if word[:cut] in vocab and word[cut:] in vocab]
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True,
                                 fuse_unk=True))
    library.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                for token in ("<unk>", "<s>", "</s>")])
    library.normalizer = normalizers.Sequence([
        *([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                         decoders.Fuse()])
    if bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                               special_tokens=[("<s>", 1)])
    return library


def phi3_like() -> Tokenizer:
    """Single bytes, and control tokens most of which take away the space behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([
        AddedToken(text, special=True, normalized=False, rstrip=text in ("</s>", "<|user|>", "<|end|>"))
        for text in ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>")])
    return library
