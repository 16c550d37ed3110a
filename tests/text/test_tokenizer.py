"""Ids, special tokens and what ends a sequence."""

import base64
import json
import re
import threading
import warnings

import pytest

from quantkit.support.errors import SourceError, UsageError
from quantkit.testing import CHAT_TEMPLATE, tiny_tokenizer
from quantkit.text.tokenizer import Tokenizer

BOS = 1


def make(adds_bos=True, settings=None, generation=None, config=None, **files):
    content = {"tokenizer.json": tiny_tokenizer(adds_bos).to_str().encode(),
               "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>",
                                                    **(settings or {})}).encode(),
               "generation_config.json": json.dumps(generation or {}).encode()}
    return Tokenizer({**content, **files}, config or {})


@pytest.mark.parametrize(("adds", "text", "starts"), [
    (True, "the", 1), (False, "the", 0), (True, "", 1), (False, "", 0),
    (True, "<s>the", 1), (False, "<s>the", 1)])  # a text that has its BOS gets no second one and loses none
def test_bos_is_there_once_or_never(adds, text, starts):
    tokenizer = make(adds)
    plain = tokenizer.encode(text.removeprefix("<s>"), special=False)
    assert tokenizer.encode(text) == [BOS] * starts + plain


def test_the_first_token_of_every_text():
    assert make(adds_bos=True).first_id == BOS
    assert make(adds_bos=False).first_id is None


def test_a_bos_that_the_text_repeats_is_the_texts_own_affair():
    tokenizer = make()
    assert tokenizer.encode("<s><s>a")[:3] == [BOS, BOS, tokenizer.encode("a", special=False)[0]]
    assert tokenizer.encode("<s><s>a", special=False)[:2] == [BOS, BOS]


@pytest.mark.oracle
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("setting", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_specials_are_put_as_transformers_does(adds, setting, tmp_path):
    auto = pytest.importorskip("transformers").AutoTokenizer
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>",
                **setting}
    tiny_tokenizer(adds).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = auto.from_pretrained(str(tmp_path))
    assert make(adds, setting).encode("the cat ✓") == theirs("the cat ✓")["input_ids"]


def test_the_first_conversation_of_a_prepared_one_reads_no_file(monkeypatch):
    tokenizer = make(settings={"chat_template": CHAT_TEMPLATE})
    tokenizer.prepare()
    for name in ("token_length", "ControlTokens"):
        monkeypatch.setattr(f"quantkit.text.tokenizer.{name}", None)
    assert tokenizer.least_tokens("the" * 100) > 0
    assert tokenizer.chat([{"role": "user", "content": "<|im_end|>"}])
    with pytest.raises(TypeError):  # without, it would
        make().least_tokens("the")


def test_a_broken_template_stops_whoever_uses_it_and_not_the_preparation():
    tokenizer = make(settings={"chat_template": "{{ 1"})
    tokenizer.prepare()
    with pytest.raises(SourceError):
        tokenizer.chat([{"role": "user", "content": "a"}])


def test_round_trip():
    tokenizer = make()
    text = "The naïve 日本 👩‍👧 <end>\n\n  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("<s>a<|im_end|>"), skip_special=False) == "<s>a<|im_end|>"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({}, {}, {3}), ({"eos_token_id": 0}, {}, {0, 3}), ({"eos_token_id": [0, 2]}, {"eos_token_id": 5}, {0, 2,
                                                                                                       3, 5}),
    ({"eos_token_id": None}, {"eos_token_id": [7]}, {3, 7}), ({"eos_token_id": [True, "x", 1.5]}, {}, {3}),
])
def test_every_end_of_sequence_id_counts(generation, config, expected):
    assert make(generation=generation, config=config).eos_ids == expected


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"


@pytest.mark.parametrize(("template", "more"), [
    (CHATML.replace("END", "<|im_end|>"), {3}), (CHATML.replace("END", "\n\n"), {2}),
    ("{{ messages }}", set()),
    (CHATML.replace("END", "{{ '<|im_end|>' if loop.last else '</s>' }}"), {3}), ("{{ 1", set()),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
     + CHATML.replace("END", "<|im_end|>"), {3})])
def test_what_the_template_writes_behind_an_answer_ends_it(template, more):
    """At the end of a conversation, or else where the next turn begins."""
    made = make(settings={"eos_token": "<|endoftext|>", "chat_template": template})
    assert made.eos_ids == {0} | more


def test_a_template_that_is_given_ends_answers_too():
    made = make(settings={"eos_token": "<|endoftext|>"})
    assert made.eos_ids == {0}
    made.use_template(CHATML.replace("END", "<|im_end|>"))
    assert made.eos_ids == {0, 3}


@pytest.mark.parametrize(("settings", "warned"), [
    ({"eos_token": None}, "no token is known to end an answer"),
    ({"chat_template": CHATML.replace("END", "<|eot_id|>")}, r"ends a turn with <\|eot_id\|>, which is no"),
    ({"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}, None),
    ({}, None)])
def test_an_end_that_nothing_knows_is_warned_of(settings, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert make(settings=settings).eos_ids == (set() if "eos_token" in settings else {3})
    assert len(caught) == bool(warned) and all(re.search(warned, str(one.message)) for one in caught)


@pytest.mark.parametrize("ignore", [True, False])
def test_bpe_that_lost_its_merges_is_refused(ignore):
    data = json.loads(tiny_tokenizer().to_str())
    data["model"] |= {"merges": [], "ignore_merges": ignore}
    if ignore:
        assert make(**{"tokenizer.json": json.dumps(data).encode()}).encode("the")
        return
    with pytest.raises(SourceError, match="without merges"):
        make(**{"tokenizer.json": json.dumps(data).encode()})
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {text: n for text, n in vocab.items() if len(text) == 1 or n < 4}
    assert make(**{"tokenizer.json": json.dumps(data).encode()}).encode("the"), "a tokenizer of characters"


def test_special_tokens_may_be_tables():
    tokenizer = make(settings={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None})
    assert tokenizer.bos_id == BOS and tokenizer.eos_ids == frozenset()
    assert make(settings={"bos_token": "<unheard of>"}).bos_id is None


def test_no_tokenizer_says_what_is_there_instead():
    with pytest.raises(SourceError, match=r"no tokenizer\.json") as caught:
        Tokenizer({"tokenizer.model": b"x", "tokenizer_config.json": b"{}"}, {})
    assert "tokenizer.model" in caught.value.why and "save_pretrained" in caught.value.next
    with pytest.raises(SourceError) as caught:
        Tokenizer({}, {})
    assert "none" in caught.value.why


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b"\xff\xfe", b"{\"version\": \"1.0\"}", b"{" * 10_000,
                                    b"null",
                                    b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
                                    b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'])
def test_a_broken_tokenizer_is_an_error(broken):
    with pytest.raises(SourceError, match=r"tokenizer\.json can't be read"):
        make(**{"tokenizer.json": broken})


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("broken", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_broken_settings_are_an_error(name, broken):
    with pytest.raises(SourceError, match=name):
        make(**{name: broken})


def test_chat_has_no_bos_but_the_templates():
    template = {"chat_template": "{{ bos_token }}" + CHAT_TEMPLATE}
    ids = make(settings=template).chat([{"role": "user", "content": "hi"}])
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert make(settings=template).decode(ids, skip_special=False) == (
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_sees_every_special_token():
    settings = {"pad_token": "<|endoftext|>", "chat_template": "{{ pad_token }}{{ eos_token }}"}
    assert make(settings=settings).chat([]) == [0, 3]


def test_without_a_template():
    tokenizer = make()
    assert not tokenizer.has_chat
    with pytest.raises(SourceError, match="no chat template") as caught:
        tokenizer.chat([])
    assert "--chat" in caught.value.next


def test_a_template_that_nobody_uses_keeps_no_model_from_loading():
    tokenizer = make(settings={"chat_template": "{% broken"})
    assert tokenizer.encode("a")
    with pytest.raises(SourceError, match="malformed"):
        tokenizer.chat([])


def test_truncation_in_the_file_is_not_obeyed():
    inner = tiny_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = make(**{"tokenizer.json": inner.to_str().encode()})
    assert tokenizer.decode(tokenizer.encode("a long sentence")) == "a long sentence"


def test_a_conversation_that_is_whole_ends_without_the_beginning_of_an_answer():
    tokenizer = make(settings={"chat_template": CHAT_TEMPLATE})
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    whole = tokenizer.chat_text(said, answer=False)
    assert whole.endswith("ho<|im_end|>\n")
    assert tokenizer.chat_text(said) == whole + "<|im_start|>assistant\n"


def test_special_tokens_as_they_are_written():
    assert set(make().controls.ids) == {"<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token"])
def test_half_a_character_in_the_settings_is_an_error(role):
    for value in ("\ud800", {"content": "\udfff"}):
        with pytest.raises(SourceError, match=r"tokenizer_config\.json is not JSON") as caught:
            make(settings={role: value})
        assert "surrogate" in caught.value.why
    assert make(settings={role: "😀", "note": "\\ud800"}).encode("a")  # neither is half


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_character_in_a_text_is_an_error(text):
    tokenizer = make(settings={"chat_template": CHAT_TEMPLATE})
    for use in (tokenizer.encode, lambda said: tokenizer.chat([{"role": "user", "content": said}]),
                lambda said: tokenizer.encode(said, parse_special=False)):
        with pytest.raises(UsageError, match="half a character"):
            use(text)


def changed(**parts):
    content = json.loads(tiny_tokenizer().to_str())
    return json.dumps({**content, **parts}).encode()


BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
REPLACES = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}


@pytest.mark.parametrize("parts", [{"pre_tokenizer": BACKTRACKS}, {"normalizer": REPLACES}])
def test_a_panic_of_the_library_is_an_error_on_every_thread(parts):
    """Its expressions backtrack up to a limit, and then it panics, which is no Exception."""
    tokenizer, found = make(**{"tokenizer.json": changed(**parts)}), []

    def work():
        try:
            tokenizer.encode("a" * 40 + "!")
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert [type(error) for error in found] == [SourceError] * 3
    assert all("tokenizer failed" in error.what and "retry-limit" in error.why for error in found)
    assert tokenizer.encode("hi")


def test_a_panic_of_a_decoder_is_an_error():
    tokenizer = make(**{"tokenizer.json": changed(decoder={"type": "Strip", "content": "a", "start": 0,
                                                           "stop": 10**6})})
    with pytest.raises(SourceError, match="failed on token ids"):
        tokenizer.decode(tokenizer.encode("aa", special=False))
    with pytest.raises(SourceError, match="failed on token ids"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("parts", [
    {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}},
    {"normalizer": {"type": "Prepend", "prepend": "b" * 1000}},
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}},
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a"}] * 40}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
    {"normalizer": {"type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(b"\0\0\0\0a\0" + b"b" * 1000).decode()}},
    {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}},
    {"post_processor": {"type": "TemplateProcessing", "pair": [], "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 2000, "tokens": ["<s>"] * 2000}}}},
], ids=range(8))
def test_what_makes_gigabytes_of_a_text_is_refused(parts):
    with pytest.raises(SourceError, match=r"times as long|around every text"):
        make(**{"tokenizer.json": changed(**parts)})


def test_names_of_templates_that_are_no_names():
    odd = [{"name": {"a": 1}, "template": "x"}, {"name": "default", "template": {"b": 2}}]
    assert not make(settings={"chat_template": odd}).has_chat
