"""A stranger's template reaches nothing of Python and ends soon, whatever it tries."""

import tracemalloc

import pytest

from quantkit.support.errors import SourceError
from quantkit.text import rendering, sandbox
from quantkit.text.chat import ChatTemplate

TEXT = "hi" * 100
MESSAGES = [{"role": "user", "content": TEXT}]


def render(template):
    """In this process: what is tested here is the sandbox, which stops most templates by itself."""
    return rendering.render(template, {"messages": MESSAGES, "bos_token": "<s>"})


REACHING = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}",
    "{{ ().__class__.__base__.__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
    "{{ range.__globals__ }}", "{{ raise_exception.__globals__['os'] }}", "{{ strftime_now.__code__ }}",
    "{{ self.__init__ }}", "{{ self._TemplateReference__context }}", "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__ }}", "{{ lipsum() }}", "{{ namespace.__init__ }}", "{{ dict.__base__ }}",
    "{{ dict.mro() }}", "{{ (range(3)|map('abs')).gi_frame }}", "{% macro g() %}{% endmacro %}{{ g._func }}",
    "{{ ['']|map(attribute='__class__')|list }}", "{{ messages|sum(attribute='__class__') }}",
    "{{ messages|groupby('__class__') }}", "{{ messages|selectattr('__class__')|list }}",
    "{{ [messages]|join(attribute='__class__') }}", "{{ [messages]|sort(attribute='__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ messages|map('attr', '__class__')|list }}", "{{ ''['for' ~ 'mat'] }}",
    "{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ messages[0].clear() }}",
    "{{ messages[0].pop('role') }}", "{{ messages[0].setdefault('a', 1) }}", "{{ loop.__init__ }}",
    "{% for m in messages %}{{ loop._iterable.gi_frame }}{% endfor %}", "{{ bos_token.__doc__ }}",
    "{{ bos_token.encode() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}",
    "{% extends 'base' %}", "{% from 'x' import y %}", "{{ eval('1') }}", "{{ open('/etc/passwd') }}",
    "{{ __import__('os') }}", "{{ environment.globals.x }}", "{{ ''.join.__self__ }}",
]

ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set s = messages[0].content %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor "
    "%}"
    "{% endfor %}",
    "{% for a in range(5) recursive %}{{ loop(range(5)) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
]

DOUBLING = ("{{% set n = namespace(s={0}) %}}{{% for a in range(80) %}}{{% set n.s = {1} %}}{{% endfor %}}"
            "{{{{ n.s }}}}")
BLOATED = [
    "{{ 'a' * 1000000000 }}", "{{ [1] * 1000000000 }}", "{{ 1000000000 * 'a' }}", "{{ 10 ** 10 ** 10 }}",
    "{{ 'a'.center(1000000000) }}", "{{ 'a'|center(1000000000) }}", "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}", "{{ '\t'.expandtabs(1000000000) }}", "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}", "{{ '%1000000000d'|format(1) }}", "{{ (1).to_bytes(1000000000) }}",
    "{{ 'a'|indent(1000000000, true) }}", "{{ [1]|tojson(indent=1000000000) }}",
    "{{ 'a'|wordwrap(1, wrapstring=messages[0].content) }}", "{{ range(1000000000)|list }}",
    "{{ range(-99999999999999999999999999999999, 99999999999999999999999999999999)|list }}",
    "{{ range(99999)|join(messages[0].content) }}",
    "{{ messages[0].content.join(range(99999)|map('string')) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}", "{{ [[1]]|sum(start=[]) }}",
    "{{ range(99999)|map('replace', '1', messages[0].content)|list|length }}",
    "{% for a in range(100000) %}{{ messages[0].content }}{% endfor %}",
    "{% set x %}{% for a in range(100000) %}" + "abcdefgh" * 20 + "{% endfor %}{% endset %}{{ x|length }}",
    "{% set s = messages[0].content.replace('hi', 'h' ~ range(999)|join) %}{{ " + "s ~ " * 5000 + "s }}",
    DOUBLING.format("'aa'", "n.s ~ n.s"), DOUBLING.format("'aa'", "n.s + n.s"), DOUBLING.format("3",
                                                                                                "n.s * n.s"),
    DOUBLING.format("[1]", "[n.s, n.s]"), DOUBLING.format("[1]", "(n.s, n.s)"),
    DOUBLING.format("[1]", "n.s + n.s"), DOUBLING.format("{}", "{'a': n.s, 'b': n.s}"),
    DOUBLING.format("1", "dict(a=n.s, b=n.s)"), DOUBLING.format("'aa'", "n.s|replace('a', 'aaaa')"),
    DOUBLING.format("'aa'", "n.s.replace('a', 'aaaa')"), DOUBLING.format("'aa'", "n.s.join('aaa')"),
    DOUBLING.format("'aa'", "['b', 'b', 'b']|join(n.s)"),
]

LARGE = ["{{ a }}" * 20_000, "{% if a %}" * 3000 + "{% endif %}" * 3000,
         "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
         "{{ a" + ".b" * 20_000 + " }}", "{{ s" + " ~ s" * 20_000 + " }}", "{{ " + "9" * 100_000 + " }}",
         "{% for a in b %}" * 30 + "{% endfor %}" * 30]


@pytest.mark.parametrize("template", REACHING)
def test_what_reaches_for_python_is_refused(template):
    assert "text" not in render(template)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", [*ENDLESS, *BLOATED], ids=range(len(ENDLESS) + len(BLOATED)))
def test_a_bomb_is_stopped(template, monkeypatch):
    """By its work, not by the clock: the same on every machine."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1e9)
    assert "text" not in render(template)


def test_operands_are_counted_before_they_are_joined():
    """A sum of many references takes no memory before it is made, and then gigabytes."""
    tracemalloc.start()
    try:
        source = "{% set s = messages[0].content.replace('hi', 'h' ~ range(999)|join) %}{{ "
        assert "text" not in render(source + "s ~ " * 999 + "s }}")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6


def test_the_whole_output_is_limited():
    source = "{% set s = messages[0].content.replace('hi', 'h' ~ range(999)|join) %}"
    assert "writes more than" in render(source + "{{ s }}" * 20)["refused"]


def test_the_clock_stops_it_too(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    assert "it takes more than" in render("{% for a in range(3) %}{% endfor %}")["refused"]


@pytest.mark.parametrize("template", LARGE, ids=range(len(LARGE)))
def test_a_template_too_large_or_deep_is_refused_when_it_is_read(template):
    with pytest.raises(SourceError, match="chat template"):
        ChatTemplate(template)


def test_one_rendering_leaves_nothing_behind_for_the_next(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_WORK", 1100 * sandbox.STEP)
    template = "{% for m in messages %}{% for a in range(1000) %}{% endfor %}{% endfor %}x"
    for _ in range(3):  # together more work than one may do
        assert render(template) == {"text": "x"}


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "a"}]
    ChatTemplate("{% set messages = messages[1:] %}{{ messages }}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_namespaces_that_hold_each_other_can_be_written():
    assert render("{% set a = namespace() %}{% set a.a = a %}{{ a }}")["text"] == "<namespace>"
