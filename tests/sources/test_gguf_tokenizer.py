from __future__ import annotations

import itertools
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from quantkit.sources.gguf_pretokenizers import PRE_TOKENIZERS
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError
from quantkit.text.tokenizer import Tokenizer as Text

pytestmark = pytest.mark.filterwarnings("ignore:.*how its model cuts text")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "Ġ t", "Ġt he", "1 2", "12 3", "Ġ Ġ"]
BYTE_LEVEL = ["<|end|>", "<think>", *ALPHABET, *(m.replace(" ", "") for m in MERGES)]


def byte_level(pre: str | None = "smollm", **keys):
    found = {"model": "gpt2", "tokens": BYTE_LEVEL, "merges": MERGES, "eos_token_id": 0,
             "token_type": [3, 4] + [1] * (len(BYTE_LEVEL) - 2), "pre": pre, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


PIECES = {"▁": -1.0, "t": -2.0, "h": -3.0, "e": -4.0, "i": -5.0, "s": -6.0, "th": -7.0, "▁the": -8.0,
          "▁t": -9.0, "he": -10.0, "is": -11.0, "▁is": -12.0, "this": -13.0, "▁▁": -14.0, "ee": -15.0,
          "</": -20.0, "s>": -21.0, "<": -22.0, "/": -23.0, ">": -24.0}


def sentencepiece(**keys):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    found = {"model": "llama", "tokens": tokens, "scores": [0.0] * 259 + list(PIECES.values()),
             "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES), "bos_token_id": 1, "eos_token_id": 2,
             "unknown_token_id": 0, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def load(metadata, vocab: int = 1000) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata, "x.gguf", vocab)["tokenizer.json"].decode())


def settings_of(metadata) -> tuple[dict, dict]:
    files = tokenizer_files(metadata, "x.gguf", 1000)
    return json.loads(files["tokenizer_config.json"]), json.loads(files["generation_config.json"])


@settings(max_examples=100, deadline=None)
@given(text=st.text(), pre=st.sampled_from([p for p, rule in PRE_TOKENIZERS.items() if not rule.nfc]))
def test_any_text_round_trips(text, pre):
    tokenizer = load(byte_level(pre, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre,text,wanted", [
    ("smollm", "the 1234", ["t", "he", "Ġ", "1", "2", "3", "4"]),
    ("gpt-2", "the 1234", ["t", "he", "Ġ", "123", "4"]), (None, "123", ["123"]),
    ("llama-bpe", "the 1234", ["t", "he", "Ġ", "123", "4"]),
    ("llama-bpe", "1212123", ["12", "1", "2", "12", "3"]),
    ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]), ("gpt-2", "x\n\nthe", ["x", "Ċ", "Ċ", "t", "he"]),
    ("smollm", "the the", ["t", "he", "Ġthe"]),
])
def test_text_is_cut_by_the_rule_that_is_named(pre, text, wanted):
    assert load(byte_level(pre, add_bos_token=False)).encode(text).tokens == wanted


@pytest.mark.parametrize("pre,warned", [(None, True), ("default", True), ("gpt-2", False), ("smollm", False)])
def test_a_rule_that_is_not_named_is_a_guess_and_said_so(pre, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(byte_level(pre))
    assert [("x.gguf" in str(w.message) and "cuts text" in str(w.message)) for w in caught] == [True] * warned


def test_llama_3_takes_a_piece_that_is_a_token_whole():
    """Its vocabulary has tokens that no merges lead to."""
    tokens = [*BYTE_LEVEL, "xyz"]
    for pre, wanted in (("llama-bpe", ["xyz"]), ("gpt-2", ["x", "y", "z"])):
        assert load(byte_level(pre, tokens=tokens, token_type=None)).encode("xyz").tokens == wanted


def test_unicode_forms_are_composed_for_qwen_only():
    decomposed = "e\u0301"
    for pre, same in (("qwen2", True), ("gpt-2", False)):
        tokenizer = load(byte_level(pre))
        assert (tokenizer.encode(decomposed).ids == tokenizer.encode("é").ids) is same


@pytest.mark.parametrize("pre", ["kimi-k2", "", "GPT-2", 3])
def test_an_unknown_rule_is_named(pre):
    with pytest.raises(SourceError, match="splits text by the rule") as caught:
        load(byte_level(pre))
    assert repr(str(pre)) in caught.value.what and "smollm" in (caught.value.why or "")


def test_control_tokens_are_special_and_the_author_s_own_are_not():
    tokenizer = load(byte_level())
    ids = tokenizer.encode("<think>a<|end|>").ids
    assert ids == [1, tokenizer.token_to_id("a"), 0]
    assert tokenizer.decode(ids) == "<think>a"  # reasoning must not vanish from the answer
    assert tokenizer.get_vocab_size() == len(BYTE_LEVEL)


def best_first(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: join the neighbors whose piece has the best score."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while pairs := [(PIECES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                    if a + b in PIECES]:
        i = -max(pairs)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


@settings(max_examples=200, deadline=None)
@given(st.text("thise /", max_size=30))
def test_sentencepiece_merges_by_score(text):
    assert load(sentencepiece()).encode(text, add_special_tokens=False).tokens == best_first(text)


def test_sentencepiece_falls_back_to_bytes_and_round_trips():
    tokenizer = load(sentencepiece())
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("the this", "é\n日本", " the", "the  is "):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("</s>").ids[:2] == [1, 2]


def test_no_special_token_is_merged_from_text():
    merges = json.loads(tokenizer_files(sentencepiece(), "x", 1000)["tokenizer.json"])["model"]["merges"]
    assert ["▁t", "he"] in merges and ["t", "h"] in merges
    assert all("".join(pair) != "</s>" for pair in merges)  # though "</" and "s>" are tokens


GEMMA = [*PIECES, "  ", "   ", "    ", "\n\n"]


def gemma(**keys):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
              *(piece for piece in GEMMA if piece != "▁▁")]
    ordinary = len(tokens) - 259 - 4
    return sentencepiece(tokens=tokens, scores=[0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
                         token_type=[2, 3, 3] + [6] * 256 + [1] * ordinary + [4] * 4, add_space_prefix=False,
                         **keys)


@pytest.mark.parametrize(("text", "wanted"), [
    ("e  e", ["e", "▁▁", "e"]), ("e ▁ e", ["e", "▁▁▁", "e"]), ("▁▁", ["▁▁"]), ("▁e", ["▁", "e"]),
    ("e ▁▁▁ e", ["e", "▁▁▁▁", "▁", "e"]), ("\n\n ▁\n\n", ["\n\n", "▁▁", "\n\n"]), (" e", ["▁", "e"])])
def test_a_token_of_spaces_is_one_of_the_signs_for_spaces_too(text, wanted):
    """As SentencePiece has it: spaces and ``▁`` are the same once a text is normalized."""
    tokenizer = load(gemma())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [tokenizer.id_to_token(token) for token in ids] == wanted
    assert max(ids) < len(gemma()["tokenizer.ggml.tokens"])
    assert tokenizer.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(("name", "strips"), [("Phi 3 Mini", False), ("Phi-3-mini-4k-instruct", True),
                                              ("phi3", True), (None, False), (3, False)])
def test_phi_3_s_tokens_take_the_white_space_behind_them(name, strips):
    """Its template puts a line break there, which the model never saw."""
    tokenizer = load({**sentencepiece(token_type=[2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 1) + [3]),
                      "general.name": name})
    ids = tokenizer.encode(">\n is", add_special_tokens=False).ids
    tokens = [tokenizer.id_to_token(token) for token in ids]
    assert tokens == [">", "▁is"] if strips else [">", "▁", "<0x0A>", "▁is"]
    assert "<0x0A>" in tokenizer.encode("<s>\n", add_special_tokens=False).tokens


def test_no_space_in_front_when_the_file_says_so():
    tokenizer = load(sentencepiece(add_space_prefix=False))
    assert tokenizer.encode("the").tokens == ["<s>", "th", "e"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_ends():
    assert len(load(byte_level("gpt-2", bos_token_id=1)).encode("e").ids) == 1
    assert load(byte_level("llama-bpe", bos_token_id=1)).encode("e").ids[0] == 1  # llama.cpp's default
    assert load(byte_level("llama-bpe", bos_token_id=1, add_bos_token=False)).encode("e").ids[0] != 1
    assert load(byte_level("gpt-2", bos_token_id=1, add_bos_token=True)).encode("e").ids[0] == 1
    both = load(byte_level("gpt-2", bos_token_id=1, add_bos_token=True, add_eos_token=True))
    e = both.token_to_id("e")
    assert both.encode("e").ids == [1, e, 0] and both.encode("e", "e").ids == [1, e, 0, 1, e, 0]
    assert load(byte_level("gpt-2", add_bos_token=True)).encode("e").ids == [e]  # there is none to add


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def chatml(template=True, **keys):
    tokens = [*BYTE_LEVEL, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra|>", "[x]"]
    types = [3, 4] + [1] * (len(BYTE_LEVEL) - 2) + [3, 3, 3, 3, 1]
    given = {"tokens": tokens, "token_type": types, "eos_token_id": len(BYTE_LEVEL), **keys}
    return byte_level(**given) | ({"tokenizer.chat_template": CHATML} if template else {})


def text_of(metadata):
    files = tokenizer_files(metadata, "x.gguf", 1000)
    return Text(files, {}), len(BYTE_LEVEL)


EXTRA = len(BYTE_LEVEL) + 3


@pytest.mark.parametrize(("keys", "more"), [
    ({}, {2}), ({"eot_token_id": EXTRA}, {2, 3}), ({"eom_token_id": EXTRA}, {2, 3}),
    ({"eos_token_ids": [EXTRA, 99999]}, {2, 3}), ({"template": False}, set())])
def test_what_ends_an_answer(keys, more):
    """The end of the text, what other keys name, and what the template writes behind an answer."""
    made, first = text_of(chatml(**keys))
    assert made.eos_ids == {first} | {first + number for number in more}


def test_without_types_control_tokens_are_those_that_look_so():
    with pytest.warns(UserWarning, match="doesn't say which tokens are control tokens.* 5 of them"):
        made, first = text_of(chatml(token_type=None))
    ids = made.encode("<|im_start|>he<|im_end|>[x]", special=False)
    assert ids[0] == first + 1 and first + 2 in ids and first + 4 not in ids
    assert made.eos_ids == {first, first + 2}
    with pytest.warns(UserWarning, match="control tokens"):
        plain, typed = load(sentencepiece(token_type=None)), load(sentencepiece())
    assert plain.to_str() == typed.to_str()


def test_control_tokens_that_a_file_calls_text():
    types = [3, 4] + [1] * (len(BYTE_LEVEL) - 2) + [1, 1, 1, 1, 1]
    with pytest.warns(UserWarning, match=r"calls <\|endoftext\|>, <\|im_start\|>, <\|im_end\|> plain text"):
        made, first = text_of(chatml(token_type=types))
    assert made.eos_ids == {first, first + 2} and made.encode("<|im_start|>") == [first + 1]
    assert len(made.encode("<|extra|>")) > 1, "nobody writes it"


def test_settings():
    template = {"tokenizer.chat_template": "{{ messages }}"}
    config, generation = settings_of({**byte_level("smollm", bos_token_id=5, padding_token_id=0,
                                                   unknown_token_id=2, eot_token_id=3), **template})
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                      "add_bos_token": False, "add_eos_token": False, "bos_token": BYTE_LEVEL[5],
                      "eos_token": "<|end|>", "unk_token": BYTE_LEVEL[2], "pad_token": "<|end|>",
                      "chat_template": "{{ messages }}"}
    assert generation == {"bos_token_id": 5, "eos_token_id": [0, 3]}
    config, generation = settings_of(byte_level(bos_token_id=10**6, eos_token_id=-1))
    assert "bos_token" not in config and "eos_token" not in config and generation == {}


@pytest.mark.parametrize("metadata,what", [
    ({}, "no tokenizer"), (byte_level(tokens=[]), "no tokenizer"), (byte_level(model="t5"), "'t5'"),
    (byte_level(model=None), "kind 'None'"), (byte_level(tokens=[1, 2]), "tokens that is no list of strings"),
    (byte_level(tokens="abc"), "no list of strings"), (byte_level(merges=[3]), "merges that is no list"),
    (byte_level(tokens=["a", "b", "a"]), "token twice"), (byte_level(tokens=["a" * 513]), "longer than"),
    (byte_level(merges=["he"]), "malformed tokenizer"), (byte_level(merges=["x yz"]), "malformed tokenizer"),
    (byte_level(token_type=3), "token_type"), (byte_level(token_type=[1]), "token_type"),
    (byte_level(eos_token_ids=["x"]), "eos_token_ids"), (byte_level(merges=None), "without merges"),
    (byte_level(merges=[]), "without merges"),
    (byte_level(tokens=["x"] + BYTE_LEVEL * 9), "an embedding of"),
    (sentencepiece(scores=None), "scores"), (sentencepiece(scores=[0.0]), "scores"),
    (sentencepiece(scores=["x"] * 277), "scores"), (sentencepiece(scores=[float("nan")] * 277), "scores"),
    (sentencepiece(token_type=[1]), "token_type"),
])
def test_malformed(metadata, what):
    with pytest.raises(SourceError, match=what) as caught:
        tokenizer_files(metadata, "x.gguf", 1000)
    assert "x.gguf" in caught.value.what


def test_all_tokens_together_are_capped(monkeypatch):
    monkeypatch.setattr("quantkit.sources.gguf_tokenizer.MAX_TEXT", 1000)
    with pytest.raises(SourceError, match="1,000 together"):
        load(sentencepiece())


junk = st.one_of(st.none(), st.booleans(), st.integers(-3, 400), st.floats(), st.text(max_size=5),
                 st.lists(st.text(max_size=3), max_size=4), st.lists(st.integers(-1, 7), max_size=4))
KEYS = ["model", "pre", "tokens", "merges", "token_type", "scores", "bos_token_id", "eos_token_id",
        "add_bos_token", "unknown_token_id", "add_space_prefix", "eot_token_id"]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([byte_level, sentencepiece]), st.dictionaries(st.sampled_from(KEYS), junk, max_size=3))
def test_junk_makes_a_tokenizer_or_is_refused(kind, keys):
    try:
        files = tokenizer_files(kind(**keys), "x.gguf", 1000)
    except SourceError as error:
        assert "x.gguf" in error.what
    else:
        Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def real(smollm2):
    files = open_source(smollm2).side_files()
    return files, Tokenizer.from_str(files["tokenizer.json"].decode())


TEXTS = ["The year is 2024, pi is 3.14159.", " leading", "trailing  ", "a\n\n b\t\tc", "naïve 日本語 🎉",
         "don't I'll", "x<|im_start|>user\nhi<|im_end|>", "", "١٢٣ ½", "snake_case = 0x1F;  # ok"]


def test_the_real_tokenizer(real):
    files, tokenizer = real
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    tokens = tokenizer.encode("In 2024: 1234567").tokens
    assert [t for t in tokens if t.isdigit()] == list("20241234567")
    assert tokenizer.token_to_id("<|im_start|>") == 1 and tokenizer.get_vocab_size() == 49152
    config = json.loads(files["tokenizer_config.json"])
    assert "<|im_start|>" in config["chat_template"] and config["eos_token"] == "<|im_end|>"


@pytest.mark.oracle
def test_transformers_reads_the_files_the_same_way(real, tmp_path):
    transformers = pytest.importorskip("transformers")
    files, tokenizer = real
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(tokenizer.encode(text).ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


@pytest.mark.oracle
def test_agrees_with_transformers_own_conversion(real, smollm2):
    """Except that theirs doesn't know that this model splits digits."""
    transformers = pytest.importorskip("transformers")
    path = open_source(smollm2).path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        if not any(c.isnumeric() for c in text):
            assert theirs(text, add_special_tokens=False)["input_ids"] == real[1].encode(text).ids, text
