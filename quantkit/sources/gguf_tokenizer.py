"""Tokenizer files made from GGUF metadata, in Hugging Face's ``tokenizer.json`` form.

Two kinds exist in the supported families: byte-level BPE (``gpt2``) with one of several rules for cutting
text, and SentencePiece BPE (``llama``) with byte fallback.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from quantkit.sources.gguf_families import HF_FOLDER
from quantkit.sources.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from quantkit.support.errors import SourceError

MAX_TOKENS = 1_000_000
MAX_TOKEN = 512
MAX_TEXT = 2**24
"""Tokens, characters of one and of all: they bound the time that finding SentencePiece's merges takes."""
_SPACE = "▁"
PHI3 = re.compile("phi-?3", re.IGNORECASE)
"""Name of a model whose special tokens take the white space behind them, as in its ``tokenizer.json``: GGUF
doesn't say so, and llama.cpp goes by the name too."""
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
_MARK, _BRACKETED = re.compile(r"<[|｜].+[|｜]>"), re.compile(r"<.+>|\[.+\]")
"""How control tokens look: most of them, and all."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_files(metadata: Mapping[str, Any], where: str, vocab_size: int) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Args:
        metadata: the ``tokenizer.*`` keys, and ``general.name``.
        where: the file's name, for errors.
        vocab_size: rows of the embedding; no token may lie beyond.

    Raises:
        SourceError: no tokenizer, one of an unknown kind or splitting rule, or a malformed one.
    """
    tokens = _strings(metadata, "tokens", where)
    if not tokens:
        raise SourceError(f"{where} has no tokenizer", next=HF_FOLDER)
    if len(tokens) > min(vocab_size, MAX_TOKENS):
        raise SourceError(f"{where} has {len(tokens):,} tokens for an embedding of {vocab_size:,} rows",
                          why="a token would have no embedding", next="use another conversion")
    if len(set(tokens)) != len(tokens):
        raise SourceError(f"{where} has a token twice", why="its ids would be ambiguous",
                          next="use another conversion")
    if max(map(len, tokens)) > MAX_TOKEN or sum(map(len, tokens)) > MAX_TEXT:
        raise SourceError(f"{where} has tokens longer than {MAX_TOKEN} characters, or {MAX_TEXT:,} together",
                          why="no tokenizer needs them", next="use another conversion")
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise SourceError(f"{where} has a tokenizer of kind {str(model)[:80]!r}", why="known: gpt2, llama",
                          next=HF_FOLDER)
    rule = _rule(metadata, where) if model == "gpt2" else None
    kinds = _kinds(metadata, tokens, where)
    merges = _strings(metadata, "merges", where)
    if rule is not None and not merges and any(
            kind == _NORMAL and len(token) > 1 for token, kind in zip(tokens, kinds)):
        raise SourceError(f"{where} has a BPE tokenizer without merges",
                          why="every text would fall into single characters, unlike in the model's training",
                          next="convert the model again, with llama.cpp of May 2024 or newer")
    try:
        signs = rule is None and not metadata.get("tokenizer.ggml.add_space_prefix", True)
        tokens = _spaces_as_signs(kinds, tokens) if signs else tokens
        tokenizer = _sentencepiece(metadata, tokens, kinds, where) if rule is None \
            else _byte_level(tokens, merges, rule)
        _add_special(tokenizer, metadata, tokens, kinds, signs)
        config, generation = _settings(metadata, tokens, rule is None or rule.bos, where)
        _add_ends(tokenizer, config)
        text: str = tokenizer.to_str(pretty=True)
    except SourceError:
        raise
    except Exception as error:  # the library raises bare Exception, for merges of tokens that don't exist
        raise SourceError(f"{where} has a malformed tokenizer", why=str(error)[:200],
                          next="use another conversion") from None
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": _json(config),
            "generation_config.json": _json(generation)}


def _rule(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre == "default":  # conversions of before April 2024 have no name at all
        warnings.warn(f"{where} doesn't say how its model cuts text: GPT-2's rule is taken, and digits or "
                      "contractions may be cut otherwise than in training", stacklevel=2)
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise SourceError(f"{where} splits text by the rule {str(pre)[:80]!r}",
                          why=f"known: {', '.join(sorted(PRE_TOKENIZERS))}", next=HF_FOLDER)
    return PRE_TOKENIZERS[pre]


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}") or []
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise SourceError(f"{where} has a tokenizer.ggml.{key} that is no list of strings",
                          next="use another conversion")
    return values


def _kinds(metadata: Mapping[str, Any], tokens: list[str], where: str) -> list[int]:
    """A type for each token. Where the file has none, they follow from the texts. A token that ends texts or
    that the chat template writes can't be a normal one: llama.cpp overrides the type of such tokens too, by a
    list of names. Both are warned of. Raises SourceError for a list that isn't one type a token."""
    stored = metadata.get("tokenizer.ggml.token_type")
    if stored is not None and (not isinstance(stored, list) or len(stored) != len(tokens)
                               or not all(type(kind) is int for kind in stored)):
        raise SourceError(f"{where} has no tokenizer.ggml.token_type with a number a token",
                          next="use another conversion")
    template = str(metadata.get("tokenizer.chat_template", ""))
    named = [metadata.get("tokenizer.ggml.bos_token_id"), *_ends(metadata, where)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")

    def guessed(number: int, token: str) -> int:
        if _BYTE_TOKEN.fullmatch(token):
            return _BYTE
        if number == unknown:
            return _UNKNOWN
        mark = _MARK.fullmatch(token) and (stored is None or token in template)
        written = stored is None and _BRACKETED.fullmatch(token) and token in template
        role = number in named and _BRACKETED.fullmatch(token)
        return _CONTROL if mark or written or role else _NORMAL

    if stored is None:
        kinds = [guessed(number, token) for number, token in enumerate(tokens)]
        warnings.warn(f"{where} doesn't say which tokens are control tokens: those that look so are taken, "
                      f"{kinds.count(_CONTROL)} of them", stacklevel=2)
        return kinds
    wrong = {number: token for number, (token, kind) in enumerate(zip(tokens, stored))
             if kind == _NORMAL and guessed(number, token) == _CONTROL}
    if wrong:
        warnings.warn(f"{where} calls {', '.join(list(wrong.values())[:4])} plain text: taken as control "
                      "tokens", stacklevel=2)
    return [_CONTROL if number in wrong else kind for number, kind in enumerate(stored)]


def _ends(metadata: Mapping[str, Any], where: str) -> list[Any]:
    """What the file gives as ids of tokens that end an answer, the text's end first."""
    ids = metadata.get("tokenizer.ggml.eos_token_ids") or []  # in files of a few converters
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise SourceError(f"{where} has a tokenizer.ggml.eos_token_ids that is no list of numbers",
                          next="use another conversion")
    return [*(metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")), *ids]


def _byte_level(tokens: list[str], merges: list[str], rule: PreTokenizer) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rule.steps())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], where: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _token(metadata, "unknown", tokens)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(metadata, vocab, kinds, where),
                                     fuse_unk=True, byte_fallback=True, unk_token=unknown))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend(_SPACE)] if space else []) + [normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if space else []))
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], kinds: list[int],
            where: str) -> list[tuple[str, str]]:
    """SentencePiece has scores instead of merges: every way to put a token together of two others,
    the token of the best score first. https://github.com/google/sentencepiece"""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocab) \
            or not all(type(v) in (int, float) and v == v for v in scores):
        raise SourceError(f"{where} has no tokenizer.ggml.scores with a number a token",
                          next="use another conversion")
    pairs: list[tuple[str, str]] = []
    # sorting keeps the order of equals, as in Hugging Face's converter
    for token in sorted(vocab, key=lambda t: -scores[vocab[t]]):
        if kinds[vocab[token]] in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE):
            continue
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))
                if token[:cut] in vocab and token[cut:] in vocab]
        pairs += sorted(ways, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return pairs


def _spaces_as_signs(kinds: list[int], tokens: list[str]) -> list[str]:
    """The author's own tokens as SentencePiece has them: conversion to GGUF writes their ``▁`` as spaces."""
    named = [token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
             for token, kind in zip(tokens, kinds)]
    return named if len(set(named)) == len(tokens) else tokens


def _add_special(tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str], kinds: list[int],
                 signs: bool) -> None:
    """Control tokens are special and left out of decoded text, the author's own tokens are not.

    Args:
        signs: whether the author's tokens with ``▁`` are looked for where a text's spaces are ``▁`` already,
            as SentencePiece does: a ``▁`` of the text is the same. Where a ``▁`` is put in front of a text,
            the library would put one in front of these, too.
    """
    from tokenizers import AddedToken

    typed = list(zip(tokens, kinds))
    strips = PHI3.search(str(metadata.get("general.name"))) is not None
    tokenizer.add_special_tokens([
        AddedToken(token, special=True, normalized=False, rstrip=strips and token not in UNSTRIPPED)
        for token, kind in typed if kind in (_CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([
        AddedToken(token, special=False, normalized=signs and _SPACE in token,
                   rstrip=strips and token not in UNSTRIPPED)
        for token, kind in typed if kind == _USER_DEFINED])


def _settings(metadata: Mapping[str, Any], tokens: list[str], bos: bool,
              where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``tokenizer_config.json`` and ``generation_config.json``."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False))}
    for role, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"),
                      ("padding", "pad_token")):
        if (token := _token(metadata, role, tokens)) is not None:
            config[key] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    generation: dict[str, Any] = {}
    if "bos_token" in config:
        generation["bos_token_id"] = tokens.index(config["bos_token"])
    # the end of a turn ends an answer as the end of the text does
    if ids := list(dict.fromkeys(number for number in _ends(metadata, where)
                                 if type(number) is int and 0 <= number < len(tokens))):
        generation["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return config, generation


def _add_ends(tokenizer: Any, config: Mapping[str, Any]) -> None:
    from tokenizers import processors

    before = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    after = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if before or after:
        used = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
        single, two = [*before, "$A", *after], [*before, "$B:1", *after]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=[*single, *two],
                                                                 special_tokens=used)


def _token(metadata: Mapping[str, Any], role: str, tokens: list[str]) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
