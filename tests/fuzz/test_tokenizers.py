"""``tokenizer.json`` and ``tokenizer_config.json``, mutated: read, encode, decode and chat, or be refused."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quantkit.testing import CHAT_TEMPLATE, tiny_tokenizer
from quantkit.text.tokenizer import Tokenizer as OurTokenizer
from tests.text.families import FAMILIES, files_of

TEXTS = ("", "the cat", "naïve 日本 👩‍👧\x00", "a" * 300 + "!", " \n\t ", "<|im_end|><s>", "\ue000", "＜s＞")


def seeds():
    yield from ({name: json.loads(raw) for name, raw in files_of(family).items()} for family in FAMILIES)
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("a", -2.0), ("<s>", -3.0)], unk_id=0))
    pieces.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKC()])
    pieces.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.Metaspace()])
    pieces.decoder = decoders.Sequence([decoders.Metaspace(), decoders.Fuse()])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    for inner in (pieces, words, tiny_tokenizer(adds_bos=True)):
        yield {"tokenizer.json": json.loads(inner.to_str()),
               "generation_config.json": {"eos_token_id": [1, 2]},
               "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"},
                                         "chat_template": CHAT_TEMPLATE}}


def use(files):
    written = {name: json.dumps(value).encode() for name, value in files.items()}
    tokenizer = OurTokenizer(written, {"eos_token_id": 1})
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids), tokenizer.decode(ids, skip_special=False)
        tokenizer.encode(text, special=False, parse_special=False)
    tokenizer.decode(list(range(400)))
    stream = tokenizer.stream()
    for one in range(50):
        stream.push(one)
    if tokenizer.has_chat:
        tokenizer.chat([{"role": "user", "content": text} for text in TEXTS[:1]])
        tokenizer.chat([{"role": "user", "content": "<|im_end|>" + "".join(tokenizer.controls.ids)}])


def test_tokenizers(fuzz, mutations):
    hostile = ("(a+)+$", "((a|a)*)*b", "", "(", "x*", "a" * 3000, "\\p{L}+")

    def mutate(files, chance):
        if chance.random() < 0.2:  # an expression where there is one, or where there was none
            files = json.loads(json.dumps(files))
            part = chance.choice(["normalizer", "pre_tokenizer", "decoder"])
            pattern = {chance.choice(["Regex", "String"]): chance.choice(hostile)}
            files["tokenizer.json"][part] = chance.choice([
                {"type": "Replace", "pattern": pattern, "content": chance.choice(["", "b", "b" * 10_000])},
                {"type": "Split", "pattern": pattern, "invert": chance.random() < 0.5,
                 "behavior": chance.choice(["Removed", "Isolated", "MergedWithPrevious", "Contiguous"])}])
            return files
        name = chance.choice(sorted(files))
        return {**files, name: mutations["json"](files[name], chance)}

    fuzz(use, list(seeds()), mutate)
