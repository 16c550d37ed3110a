"""Where a template is found, and that it renders as transformers renders it."""

import json

import pytest

from quantkit.support.errors import SourceError
from quantkit.text.chat import ChatTemplate

CONVERSATION = [{"role": "system", "content": " You are <b>terse</b>.\n"},
                {"role": "user", "content": "Hi 'é' ✓"},
                {"role": "assistant", "content": "<think>hm</think>\n\nHello!"},
                {"role": "user", "content": "2+2?"}]

TEMPLATES = {
    "blocks": """
{% for m in messages %}
    {% if m.role == 'user' %}
[U]{{ m.content }}
    {% else %}
{{ m['content'] | trim }}
    {%- endif %}
{% endfor %}
end
""",
    "loop": """{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}
{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}{{ loop.previtem.role if loop.previtem }}
{{ loop.cycle('a', 'b') }}{% endfor %}""",
    "slices": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set sys = messages[0]['content']|trim %}{% else %}{% set rest = messages %}{% endif %}
{{ bos_token + sys }}{% for m in rest %}{{ '\\n' ~ m.role.upper() ~ ': ' ~ m.content.strip() }}{% endfor %}
{{ messages[-1].content[::-1] }}""",
    "namespace": """{% set ns = namespace(last=-1, seen='') %}{% for m in messages %}{% if m.role == 'user' %}
{% set ns.last = loop.index0 %}{% set ns.seen = ns.seen + m.role[0] %}{% endif %}{% endfor %}
{{ ns.last }}{{ ns.seen }}""",
    "think": """{% for m in messages %}{% if '</think>' in m.content %}
{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}""",
    "macro": """{% macro turn(role, text='') -%}<|{{ role }}|>{{ text }}
{{- caller() if caller }}{%- endmacro %}
{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}{% call turn('x') %}inner{% endcall %}""",
    "json": """{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}
{{ {'b': 1, 'a': [true, none]} | tojson }}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first | upper }}
{{ [3, 1, 2] | sort | reverse | join('-') }}{{ 'a b' | title | replace(' ', '_') }}{{ [1, 2] | sum }}
{{ nothing | default('d') }}{{ messages[0].items() | list | length }}{{ 'x\\ny' | indent(2) }}""",
    "tests": """{{ tools is none }}{{ documents is defined and documents }}{{ messages is iterable }}
{{ messages[0].content is string }}{{ messages[0].tool_calls is defined }}{{ 3 is odd }}""",
    "numbers": """{{ (messages | length) % 2 }}{{ 2 * 3 + 1 }}{{ 7 // 2 }}{{ 1.5 | round | int }}
{{ range(3) | list }}{{ range(2, 9, 3) | length }}""",
    "controls": """{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}
{% if add_generation_prompt %}A:{% endif %}""",
    "set blocks": """{% set x %}
{{ bos_token }} and {{ eos_token }}
{% endset %}[{{ x }}]{% filter upper %}abc{% endfilter %}
{% with y = 3 %}{{ y }}{% endwith %}{# nothing #}{% raw %}{{ x }}{% endraw %}""",
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    (expected,), _ = theirs([CONVERSATION], chat_template=TEMPLATES[name], add_generation_prompt=True,
                            bos_token="<s>", eos_token="</s>")
    got = ChatTemplate(TEMPLATES[name]).render(CONVERSATION, bos_token="<s>", eos_token="</s>")
    assert got == expected
    assert len(got) >= 3


def test_the_date():
    assert ChatTemplate("{{ strftime_now('%Y')|int > 2000 }}").render([]) == "True"


def test_the_file_of_its_own_comes_first():
    files = {"chat_template.jinja": b"one"}
    assert ChatTemplate.find(files, {"chat_template": "two"}).render([]) == "one"
    assert ChatTemplate.find({}, {"chat_template": "two"}).render([]) == "two"
    assert ChatTemplate.find({}, {}) is None


def test_of_named_templates_the_default_is_taken():
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert ChatTemplate.find({}, {"chat_template": named}).render([]) == "d"
    assert ChatTemplate.find({}, {"chat_template": named[:1]}).render([]) == "t"
    with pytest.raises(SourceError, match="no default chat template"):
        ChatTemplate.find({}, {"chat_template": [named[0], {"name": "rag", "template": "r"}]})


def test_a_template_can_refuse_the_conversation_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must\\nalternate') }}")
    with pytest.raises(SourceError) as caught:
        template.render(CONVERSATION)
    assert caught.value.why == "roles must alternate"
    assert "--chat" in caught.value.next


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ messages['a' + 1] }}",
                                      "{{ 'a' + 1 }}", "{{ strftime_now(1, 2) }}", "{{ messages|tojson(inden"
                                                                                   "t='x') }}",
                                      "{{ dict|tojson }}"])
def test_a_failing_template_is_an_error_and_not_a_crash(template):
    with pytest.raises(SourceError, match="the chat template"):
        ChatTemplate(template).render(CONVERSATION)


@pytest.mark.parametrize("template", ["{% for %}", "{{ a", "{% endif %}", "{{ a|no_such_filter }}",
                                      "{% unknown %}"])
def test_a_malformed_template_is_refused(template):
    with pytest.raises(SourceError, match="malformed"):
        ChatTemplate(template)


def test_a_malformed_list_of_templates_has_none():
    for odd in ([1, 2], [{"name": "a"}], [], 3, {"a": "b"}):
        settings = json.loads(json.dumps({"chat_template": odd}))
        if isinstance(odd, list):
            with pytest.raises(SourceError):
                ChatTemplate.find({}, settings)
        else:
            assert ChatTemplate.find({}, settings) is None
