"""Tokenizer files made from GGUF metadata, in Hugging Face's ``tokenizer.json`` form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantkit.errors import SourceError, did_you_mean

_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# pre-tokenizer name → (split digits singly first, regex)
_PRE = {"smollm": (True, _GPT2), "default": (False, _GPT2), "gpt-2": (False, _GPT2),
        "llama-bpe": (False, _LLAMA3), "llama3": (False, _LLAMA3), "qwen2": (False, _QWEN2)}
_CONTROL, _UNKNOWN, _USER_DEFINED, _BYTE = 3, 2, 4, 6
_SPACE = "▁"


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Args:
        metadata: the ``tokenizer.*`` keys.
        where: the file's name, for errors.

    Raises:
        SourceError: no tokenizer, or one of an unknown kind.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise SourceError(f"{where} has no tokenizer", next="give the model's Hugging Face folder instead")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens, where)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise SourceError(f"{where} has a tokenizer of kind {model!r}", why="known: gpt2, llama",
                          next="give the model's Hugging Face folder instead")
    special = _special(metadata, tokens)
    tokenizer.add_special_tokens(special)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                              "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", model == "llama"))}
    ids = {}
    for role, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None and 0 <= int(index) < len(tokens):
            config[key] = tokens[int(index)]
            ids[f"{role}_token_id"] = int(index)
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    generation = {k: v for k, v in ids.items() if k in ("bos_token_id", "eos_token_id")}
    if config["add_bos_token"] and "bos_token" in config:
        _prepend(tokenizer, config["bos_token"], ids["bos_token_id"])
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
            "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode()}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise SourceError(f"{where} splits text by the rule {pre!r}", why=did_you_mean(str(pre), _PRE),
                          next="give the model's Hugging Face folder instead")
    digits, regex = _PRE[pre]
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=regex is _LLAMA3))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if regex is _GPT2:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps += [pre_tokenizers.Split(Regex(regex), "isolated"),
                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    merges: list[tuple[float, str, str]] = []
    for token, index in vocab.items():  # every way to put a token together; the best score merges first
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], left, right))
    merges.sort(key=lambda m: (m[0], vocab[m[1]], vocab[m[2]]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(models.BPE(
        vocab=vocab, merges=[(left, right) for _, left, right in merges], fuse_unk=True, byte_fallback=True,
        unk_token=None if unknown is None else tokens[int(unknown)]))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend(_SPACE)] if space else []) + [normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if space else []))
    return tokenizer


def _special(metadata: Mapping[str, Any], tokens: list[str]) -> list[Any]:
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type") or []
    return [AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds) if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)]


def _prepend(tokenizer: Any, token: str, index: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, index)])
