"""What a GGUF file says about a model's tokenizer, from its ``tokenizer.json``.

llama.cpp has two tokenizers that models of these families use: byte-level BPE, whose rule for cutting text
has a name, and SentencePiece's BPE, which merges by the scores of tokens. A tokenizer that is neither is
refused, as it would make other tokens of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.export.gguf.file import Value
from quantkit.sources.gguf_pretokenizers import DIGIT, GPT2, PRE_TOKENIZERS
from quantkit.sources.gguf_tokenizer import UNSTRIPPED
from quantkit.support.errors import UnsupportedModelError
from quantkit.text.tokenizer import Tokenizer

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
_SPACE = "▁"
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
_ENDS = ("eos", "eot", "eom")
"""Keys for tokens that end an answer, all three of which llama.cpp obeys."""
_NEXT = "run the model with quantkit, or export it to another layout for vLLM"


@dataclass(frozen=True)
class TokenizerKeys:
    """What describes a tokenizer in a file.

    Attributes:
        values: the values by key.
        strips_space: whether added tokens take away the space behind them as Phi-3's do, which llama.cpp
            tells by the model's name.
        notes: sentences about what llama.cpp will do otherwise.
    """

    values: dict[str, Value]
    strips_space: bool = False
    notes: tuple[str, ...] = ()


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int) -> TokenizerKeys:
    """Keys of a tokenizer, its chat template too.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: rows of the embedding; those without a token get names that fill the list.

    Raises:
        UnsupportedModelError: llama.cpp has no such tokenizer.
        SourceError: the chat template can't be used.
    """
    data = json.loads(tokenizer.serialized())
    model, notes = data["model"], []
    if model["type"] != "BPE":
        raise _refused(f"its model is {model['type']}; BPE is needed")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"its model has {key} {model[key]!r}, for which GGUF has no key")
    added = {token["id"]: token for token in data["added_tokens"]}
    tokens, types = _tokens(tokenizer.vocabulary, added, vocab_size)
    values: dict[str, Value]
    if any(step["type"] == "ByteLevel" for step in _steps(data["pre_tokenizer"])):
        values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_tokenizer_name(data),
                  "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
                  "tokenizer.ggml.merges": [" ".join(pair) for pair in _pairs(model)]}
    elif model.get("byte_fallback"):
        prefix, only_first = _space_prefix(data)
        if only_first:
            notes.append("llama.cpp puts a space in front of text that follows a control token too, not only "
                         "in front of the first one")
        values = _sentencepiece(model, tokens, types, prefix, added)
    else:
        raise _refused("it has neither byte-level BPE nor BPE with byte fallback")
    strips_space = _strips_space(data["added_tokens"])
    stripped = [token["content"] for token in data["added_tokens"] if token["lstrip"] or token["rstrip"]]
    if stripped and not strips_space:
        more = " and others" if stripped[4:] else ""
        notes.append(f"space beside {', '.join(stripped[:4])}{more} is kept: GGUF has no key for tokens that "
                     "take it away")
    values |= _roles(tokenizer, vocab_size, notes)
    if tokenizer.has_chat:
        values["tokenizer.chat_template"] = tokenizer.template_text
    return TokenizerKeys(values, strips_space, tuple(notes))


def _refused(why: str) -> UnsupportedModelError:
    return UnsupportedModelError("llama.cpp has no tokenizer that is this model's", why=why, next=_NEXT)


def _strips_space(added: Sequence[Mapping[str, Any]]) -> bool:
    return set(UNSTRIPPED) <= {token["content"] for token in added} and all(
        not token["lstrip"] and token["rstrip"] == (token["content"] not in UNSTRIPPED) for token in added)


def _tokens(vocabulary: Mapping[str, int], added: Mapping[int, Mapping[str, Any]],
            vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id."""
    texts = {number: text for text, number in vocabulary.items()}
    if (last := max(texts, default=-1)) >= vocab_size:
        raise _refused(f"token {last} has no row in an embedding of {vocab_size}")
    tokens, types = [], []
    for number in range(vocab_size):
        text, kind = texts.get(number), NORMAL
        if text is None:
            text, kind = f"[PAD{number}]", UNUSED
            if text in vocabulary:
                raise _refused(f"it has a token {text!r}, which would stand twice in the file")
        elif number in added:
            kind = CONTROL if added[number]["special"] else USER_DEFINED
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order."""
    if part is not None and part["type"] == "Sequence":
        for step in part.get("normalizers") or part.get("pretokenizers") or []:
            yield from _steps(step)
    elif part is not None:
        yield part


def _pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def pre_tokenizer_name(data: Mapping[str, Any]) -> str:
    """llama.cpp's name for the rule by which a byte-level tokenizer cuts text.

    Args:
        data: the content of ``tokenizer.json``.

    Raises:
        UnsupportedModelError: it has none.
    """
    normalizers = [step["type"] for step in _steps(data["normalizer"])]
    if normalizers not in ([], ["NFC"]):
        raise _refused(f"its text is normalized by {', '.join(normalizers)}; NFC or nothing is needed")
    patterns = tuple(_patterns(list(_steps(data["pre_tokenizer"]))))
    merging = bool(data["model"].get("ignore_merges"))
    known = {name: rule for name, rule in PRE_TOKENIZERS.items()
             if name != "default" and (rule.patterns, rule.ignore_merges) == (patterns, merging)}
    if not known:
        raise _refused(f"its rule for cutting text, {' then '.join(patterns)[:200]}"
                       f"{' with ignore_merges' if merging else ''}, has no name in GGUF; named ones: "
                       f"{', '.join(sorted(set(PRE_TOKENIZERS) - {'default'}))}")
    # llama.cpp normalizes nothing, so a rule that differs in that alone will do
    return next((name for name, rule in known.items() if rule.nfc == bool(normalizers)), next(iter(known)))


def _patterns(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        kind = step["type"]
        if kind == "Digits" and step["individual_digits"]:
            yield DIGIT
        elif kind == "Split" and "Regex" in step["pattern"] and (step["behavior"], step["invert"]) in (
                ("Isolated", False), ("Removed", True)):
            yield step["pattern"]["Regex"]
        elif kind == "ByteLevel" and step is steps[-1] and not step["add_prefix_space"]:
            if step["use_regex"]:
                yield GPT2
        else:
            raise _refused(f"its step {json.dumps(dict(step))[:200]} for cutting text has no name in GGUF")


def _space_prefix(data: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a space is put in front of text, and whether only of the first part between control tokens."""
    normalizers, splits = list(_steps(data["normalizer"])), list(_steps(data["pre_tokenizer"]))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    harmless = [[], [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                      "invert": False}]]  # of spaces that are no longer there
    if normalizers == [{"type": "Prepend", "prepend": _SPACE}, replace] and splits in harmless:
        return True, False
    if normalizers == [replace] and splits in harmless:
        return False, False
    if not normalizers and len(splits) == 1 and splits[0]["type"] == "Metaspace" \
            and splits[0]["replacement"] == _SPACE and not splits[0].get("split", True):
        scheme = splits[0].get("prepend_scheme", "always")
        return scheme != "never", scheme == "first"
    steps = [step["type"] for step in (*normalizers, *splits)]
    raise _refused(f"its steps before merging, {', '.join(steps) or 'none'}, aren't SentencePiece's")


def _sentencepiece(model: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], prefix: bool,
                   added: Mapping[int, Mapping[str, Any]]) -> dict[str, Value]:
    if missing := sorted(set(_BYTES) - set(tokens)):
        raise _refused(f"it has no token {missing[0]}, which a byte needs that no other token has")
    kinds = [BYTE if text in _BYTES else UNKNOWN if text == model.get("unk_token") else kind
             for text, kind in zip(tokens, types)]
    scores = _scores(_pairs(model), tokens, kinds)
    # llama.cpp looks for users' tokens while a text's spaces are still spaces
    texts = [text.replace(_SPACE, " ") if kind == USER_DEFINED and added[number]["normalized"] else text
             for number, (text, kind) in enumerate(zip(tokens, kinds))]
    if len(set(texts)) != len(texts):
        raise _refused("it has two tokens that differ in a space alone")
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": texts, "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.add_space_prefix": prefix}


def _scores(pairs: Sequence[tuple[str, str]], tokens: Sequence[str], kinds: Sequence[int]) -> list[float]:
    """A score for each token: the earlier a merge makes it, the higher.

    SentencePiece merges whichever neighbors make the token of the best score, whatever the two are. So merges
    say the same only if each token's stand together, and none is missing.
    """
    ranks: dict[str, int] = {}
    previous = None
    for left, right in pairs:
        token = left + right
        if token != previous and token in ranks:
            raise _refused(f"merges that make {token!r} don't follow one another, as SentencePiece's do")
        ranks.setdefault(token, len(ranks))
        previous = token
    known, made = set(tokens), set(pairs)
    for token, kind in zip(tokens, kinds):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in known and pair[1] in known and pair not in made:
                raise _refused(f"{pair[0]!r} and {pair[1]!r} aren't merged, though their sum is a token: "
                               "SentencePiece would")
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _roles(tokenizer: Tokenizer, vocab_size: int, notes: list[str]) -> dict[str, Value]:
    """Ids of tokens with a role, and which of them are put around every text."""
    begin, end = _around(tokenizer)
    roles = tokenizer.role_ids
    values: dict[str, Value] = {}
    if (bos := begin if begin is not None else tokenizer.bos_id) is not None:
        values["tokenizer.ggml.bos_token_id"] = bos
    first = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    ends = [number for number in dict.fromkeys([*first, *sorted(tokenizer.eos_ids)])
            if 0 <= number < vocab_size]
    values |= {f"tokenizer.ggml.{name}_token_id": number for name, number in zip(_ENDS, ends)}
    if ends[len(_ENDS):]:
        texts = {number: text for text, number in tokenizer.vocabulary.items()}
        notes.append("GGUF has keys for three tokens that end an answer, so these don't: "
                     + ", ".join(texts.get(number, str(number)) for number in ends[len(_ENDS):]))
    if end is not None and end not in ends[:1]:
        raise _refused(f"it puts token {end} behind every text, which isn't the one that ends it")
    for name, role in (("unknown", "unk_token"), ("padding", "pad_token")):
        if role in roles:
            values[f"tokenizer.ggml.{name}_token_id"] = roles[role]
    return values | {"tokenizer.ggml.add_bos_token": begin is not None,
                     "tokenizer.ggml.add_eos_token": end is not None}


def _around(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The tokens that are put in front of a text and behind it."""
    plain, full = tokenizer.encode("a", special=False), tokenizer.encode("a", special=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start:start + len(plain)] == plain:
            before, after = full[:start], full[start + len(plain):]
            if len(before) <= 1 and len(after) <= 1:
                return (before[0] if before else None), (after[0] if after else None)
            break
    raise _refused(f"it makes {full} of 'a' and {plain} without special tokens; GGUF has a place for one in "
                   "front and one behind")
