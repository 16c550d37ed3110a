"""A template ends at its limit whatever a single operation of it does, and nobody else waits for it."""

import json
import subprocess
import sys
import threading
import time

import pytest

from quantkit.support import isolation
from quantkit.support.errors import SourceError
from quantkit.testing import CHAT_TEMPLATE
from quantkit.text import rendering
from quantkit.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "a" * 1000}]
MILLION = "{% set s = messages[0].content.replace('a', messages[0].content) %}"
SLOW = {
    "round to many digits": "{{ 12345|round(-10000000) }}",
    "a power of ten": "{{ 1|round(10000000, 'ceil') }}",
    "rejecting by a long list": "{% set l = range(100000)|list %}{{ l|reject('in', l)|list|length }}",
    "selecting by a long list": "{% set l = range(100000)|list %}"
                                "{{ l|select('in', l|reverse|list)|list|length }}",
    "a long needle from the right": MILLION + "{{ s.rfind(s[:250000] ~ 'b' ~ s[:250000]) }}",
    "a constant, folded by the compiler": "{% if 12345|round(-10000000) %}{% endif %}",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_single_operation_ends_in_time(name):
    template = ChatTemplate(CHAT_TEMPLATE)
    begin = time.monotonic()
    with pytest.raises(SourceError, match=f"it takes more than {rendering.SECONDS:g} s"):
        ChatTemplate(SLOW[name]).render(MESSAGES)
    assert rendering.SECONDS < 3 and time.monotonic() - begin < 10  # the rest is a busy machine's
    assert template.render(MESSAGES).startswith("<|im_start|>user")  # the next one finds nothing broken


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(rendering, "MEMORY", 128 * 2**20)
    source = (MILLION + "{% set n = namespace(l=[]) %}{% for i in range(60) %}"
              "{% set n.l = [n.l, s.upper()] %}{% endfor %}")
    with pytest.raises(SourceError, match="template"):
        ChatTemplate(source).render(MESSAGES)


def test_a_bomb_beside_others_keeps_none_of_them_waiting():
    good, bomb = ChatTemplate(CHAT_TEMPLATE), ChatTemplate(SLOW["rejecting by a long list"])
    failures = []

    def explode():
        try:
            bomb.render(MESSAGES)
        except SourceError as error:
            failures.append(error)

    threads = [threading.Thread(target=explode) for _ in range(isolation.MAX_PROCESSES - 1)]
    for thread in threads:
        thread.start()
    done = 0
    while any(thread.is_alive() for thread in threads):
        begin = time.monotonic()
        good.render(MESSAGES)
        assert time.monotonic() - begin < 1
        done += 1
    assert done > 10 and len(failures) == len(threads)


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(SourceError, match="a number in it is too large"):
        ChatTemplate("{{ 1e400 }}")


def test_half_a_character_passes_through():
    assert ChatTemplate("{{ messages[0].content }}").render([{"content": "\ud800 é 😀 \u2028\n"}]) == (
        "\ud800 é 😀 \u2028\n")


def test_no_process_is_started_before_there_is_a_template(tmp_path):
    code = """
import json, sys
from quantkit.support import isolation
from quantkit.testing import CHAT_TEMPLATE, tiny_tokenizer
from quantkit.text.tokenizer import Tokenizer

files = {"tokenizer.json": tiny_tokenizer().to_str().encode()}
tokenizer = Tokenizer(files, {})
assert not tokenizer.has_chat and tokenizer.encode("a")
print(sum(map(len, isolation._idle.values())))
settings = json.dumps({"chat_template": CHAT_TEMPLATE}).encode()
chats = Tokenizer({**files, "tokenizer_config.json": settings}, {})
assert chats.encode("a")
print(sum(map(len, isolation._idle.values())))
assert chats.has_chat and chats.chat([])
print(sum(map(len, isolation._idle.values())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "1"]


def test_the_process_imports_nothing_heavy():
    code = ("import sys; import quantkit.text.rendering, quantkit.evaluation.tasks.sandbox, json; "
            "print(json.dumps([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
