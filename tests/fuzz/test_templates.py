"""Chat templates drawn from Jinja's constructs, filters and tests: each renders or is refused, in time."""

from __future__ import annotations

from quantkit.text.chat import ChatTemplate
from quantkit.text.sandbox import _FILTERS, _METHODS

MESSAGES = [{"role": "system", "content": "be <b>brief</b>"}, {"role": "user", "content": "a b\n" * 40},
            {"role": "assistant", "content": "<think>é😀</think> 12", "parts": [{"text": "x"}, 3, None, 1.5]}]
NAMES = ("messages", "messages[0]", "messages[-1].content", "bos_token", "tools", "loop", "loop.index",
         "m", "m.content", "n", "n.l", "x", "self", "caller", "missing", "messages[2].parts")
CONSTANTS = ("0", "1", "-3", "7.5", "1e400", "-1e308", "true", "none", "''", "'a'", "'\\ud800'", "'</think>'",
             "[]", "[1, 'a', none]", "{'a': [1]}", "(1, 2)", "range(5)", "range(99999)",
             "99999999999999999999999999", "dict(a=1)", "namespace(l=[])", "strftime_now('%Y%s%%')")
TESTS = ("defined", "none", "string", "mapping", "sequence", "iterable", "odd", "divisibleby(3)", "in [1]",
         "eq 1", "lower", "callable", "sameas(1)", "gt('a')")
FILTERS, METHODS = [*sorted(_FILTERS), "tojson"], sorted(set().union(*_METHODS.values()))
REFUSED = ("nosuch", "pprint", "attr", "__class__", "append", "format", "random")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", ">=", "in", "not in", "and", "or", "is")
SEEDS = ["{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
         "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m.content] %}{% endfor %}"
         "{{ n.l|join(', ') }}",
         "{% macro f(x, y=1) %}{{ x|upper }}{{ caller() if caller }}{% endmacro %}"
         "{% call f('a') %}b{% endcall %}"]


def known(chance, names):
    return chance.choice(REFUSED) if chance.random() < 0.01 else chance.choice(names)


def expression(chance, depth=0):
    kind = chance.randrange(3 if depth > 1 else 12)
    if kind < 2:
        return chance.choice(NAMES)
    if kind == 2:
        return chance.choice(CONSTANTS)
    inner = [expression(chance, depth + 1) for _ in range(3)]
    if kind < 6:
        arguments = f"({', '.join(inner[1:chance.choice([1, 2, 2, 3])])})" if chance.random() < 0.6 else ""
        return f"({inner[0]})|{known(chance, FILTERS)}{arguments}"
    if kind < 8:
        return f"({inner[0]}).{known(chance, METHODS)}({', '.join(inner[1:chance.choice([1, 2, 3])])})"
    if kind == 8:
        return f"({inner[0]}) {chance.choice(OPERATORS)} ({inner[1]})"
    if kind == 9:
        return f"({inner[0]})[{inner[1]}{':' + inner[2] if chance.random() < 0.5 else ''}]"
    if kind == 10:
        return f"({inner[0]}) is {chance.choice(['', 'not '])}{chance.choice(TESTS)}"
    return f"({inner[0]} if {inner[1]} else {inner[2]})"


def statement(chance, depth=0):
    kind = chance.randrange(3 if depth > 1 else 12)
    if kind < 2:
        return f"{{{{ {expression(chance)} }}}}"
    if kind == 2:
        return chance.choice(["text\n", " <|im_end|> ", "{# note #}", "{% raw %}{{{% endraw %}"])
    body = "".join(statement(chance, depth + 1) for _ in range(chance.randint(1, 3)))
    what = expression(chance, 3)
    return {
        3: f"{{% for m in {what} %}}{body}{{% endfor %}}",
        4: f"{{% for m in {what} recursive %}}{body}{{{{ loop(m) }}}}{{% else %}}{body}{{% endfor %}}",
        5: f"{{% if {what} %}}{body}{{% elif {what} %}}{body}{{% else %}}{body}{{% endif %}}",
        6: f"{{% set x = {what} %}}{body}",
        7: f"{{% set n = namespace(l={what}) %}}{body}{{% set n.l = [n.l, n.l] %}}",
        8: f"{{% macro f(x={what}) %}}{body}{{% endmacro %}}{{{{ f({what}) }}}}",
        9: f"{{% filter {chance.choice(FILTERS)} %}}{body}{{% endfilter %}}",
        10: f"{{% set x %}}{body}{{% endset %}}{{{{ x }}}}",
        11: f"{{% generation %}}{body}{{% break %}}{{% endgeneration %}}"}[kind]


def draw(seed, chance):
    if chance.random() < 0.2:  # what is no longer a template
        at = chance.randrange(len(seed))
        return seed[:at] + chance.choice(["{{", "%}", "{% if", "'", "(", "\x00", "|"]) + seed[at:]
    return "".join(statement(chance) for _ in range(chance.randint(1, 2)))


def test_templates(fuzz):
    fuzz(lambda source: ChatTemplate(source).render(MESSAGES, bos_token="<s>"), SEEDS, draw)
