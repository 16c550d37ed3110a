"""How byte-level BPE cuts text before it merges, by the name that GGUF has for it (``tokenizer.ggml.pre``).

GGUF doesn't say the rule itself. Regular expressions are those of the models' own ``tokenizer.json``, in
Oniguruma's syntax; llama.cpp's, in ``src/llama-vocab.cpp``, are the same, or nearly where its engine lacks
something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS, _PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = (rf"{_LOWER_WORD}{_CONTRACTION}?|{_UPPER_WORD}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}")
_NEWLINE, _CHINESE = r"[\r\n]", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = ("41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
          "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
          "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
          "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
          "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
          "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
          "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
          "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943")
"""Letters with upper or lower case of an older Unicode, as the DeepSeek LLM's tokenizer lists them."""
_LETTERS = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _CASED.split())
_ASCII_SIGNS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_SENTENCE = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging.

    Attributes:
        patterns: each cuts the pieces that those before it left: what it matches is a piece, and so is what
            lies between.
        nfc: whether text is normalized to Unicode's NFC first.
        ignore_merges: whether a piece that is a token is taken without merging.
        bos: whether a BOS is put in front when the file doesn't say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False

    def steps(self) -> list[Any]:
        """The steps of the ``tokenizers`` library, the last of which turns bytes into characters."""
        from tokenizers import Regex, pre_tokenizers

        library = self.patterns[-1] == GPT2  # that pattern is built into its last step
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True) if pattern == DIGIT
            else pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in (self.patterns[:-1] if library else self.patterns)]
        return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=library)]


_GPT2_RULE, _GPT_NEOX_RULE = PreTokenizer((GPT2,)), PreTokenizer((GPT2,), nfc=True)
_DIGITS_RULE = PreTokenizer((DIGIT, GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True)
_CL100K_RULE = PreTokenizer((_LLAMA3,))
_QWEN2_RULE = PreTokenizer((_QWEN2,), nfc=True)
PRE_TOKENIZERS = {
    "default": _GPT2_RULE, "gpt-2": _GPT2_RULE, "phi-2": _GPT2_RULE,
    "mpt": _GPT_NEOX_RULE, "olmo": _GPT_NEOX_RULE,
    "smollm": _DIGITS_RULE, "starcoder": _DIGITS_RULE, "refact": _DIGITS_RULE, "minerva-7b": _DIGITS_RULE,
    "command-r": PreTokenizer((DIGIT, GPT2), nfc=True),
    "llama-bpe": _LLAMA3_RULE, "llama3": _LLAMA3_RULE, "llama-v3": _LLAMA3_RULE, "falcon3": _LLAMA3_RULE,
    "smaug-bpe": _CL100K_RULE, "dbrx": _CL100K_RULE,
    "qwen2": _QWEN2_RULE, "deepseek-r1-qwen": _QWEN2_RULE, "megrez": _QWEN2_RULE,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, bos=True), "gpt-4o": PreTokenizer((_GPT4O,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "viking": PreTokenizer((_SENTENCE, DIGIT)),
    "deepseek-llm": PreTokenizer((_NEWLINE, rf"\s?[{_LETTERS}]+", rf"\s?[{_ASCII_SIGNS}]+", r"\s+$",
                                  _CHINESE, r"\p{N}+")),
    "deepseek-coder": PreTokenizer((_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, DIGIT))}
"""By the name in ``tokenizer.ggml.pre``."""
