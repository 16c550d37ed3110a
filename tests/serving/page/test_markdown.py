"""Markdown becomes elements; no text becomes anything else."""

import random

import pytest

RENDER = """(text) => {
  const root = element("div"), view = new MarkdownView(root);
  view.push(text);
  view.end();
  return root.innerHTML;
}"""
STREAM = """([text, cuts]) => {
  const shown = (text, complete) => {
    const root = element("div"), view = new MarkdownView(root);
    view.text = text;
    view.render(complete);
    return root.innerHTML;
  };
  const root = element("div"), view = new MarkdownView(root);
  let start = 0;
  for (const cut of [...cuts, text.length]) {
    view.text += text.slice(start, cut);
    view.render(false);
    if (root.innerHTML !== shown(text.slice(0, cut), false)) return text.slice(0, cut);
    start = cut;
  }
  view.end();
  return root.innerHTML === shown(text, true) || text;
}"""
CASES = {
    "# One\n## Two ##\ntext": "<h3>One</h3><h4>Two</h4><p>text</p>",
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "**b** *i* _i_ ***both*** ~~s~~ `c`": (
        "<p><strong>b</strong> <em>i</em> <em>i</em> <em><strong>both</strong></em> <del>s</del> "
        "<code>c</code></p>"),
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "``a ` b`` \\*plain\\*": "<p><code>a ` b</code> *plain*</p>",
    "**open and `open": "<p>**open and `open</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---\n***": "<hr><hr>",
    "- a\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "1. a\n   - b\n     - c\n2. d": (
        "<ol><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li><li><p>d</p></li></ol>"),
    "- a\n\t- b": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul>",
    "- a\n\n- b": '<ul data-loose=""><li><p>a</p></li><li><p>b</p></li></ul>',
    "- [x] a": "<ul><li><p>☑ a</p></li></ul>",
    "a $x_1 * y_1$ costs $5 and $6": '<p>a <span class="math">$x_1 * y_1$</span> costs $5 and $6</p>',
    "$$\n- a_b\n$$": '<p class="math">$$\n- a_b\n$$</p>',
    "<b>bold</b> &lt; a<br>b": "<p>&lt;b&gt;bold&lt;/b&gt; &lt; a<br>b</p>",
    "Title\n===": "<h3>Title</h3>",
    "a\n| b | c |\n|---|- d": "<p>a<br>| b | c |<br>|---|- d</p>",
    "a\n```python\n": "<p>a</p>",
    "a\n\n- b\n  ```\n\n": "<p>a</p><ul><li><p>b</p></li></ul>",
}


@pytest.fixture(scope="module")
def page(browser, shared):
    """One page for all cases: nothing of it is kept between them."""
    opened = browser.new_page()
    opened.goto(shared.url)
    yield opened
    opened.close()


@pytest.mark.parametrize("text", CASES)
def test_markdown_is_rendered(page, text):
    assert page.evaluate(RENDER, text) == CASES[text]


def test_a_table_has_sides_and_scrolls_by_itself(page):
    html = page.evaluate(RENDER, "| a | b |\n|:-:|--:|\n| 1 | `x\\|y` |\n| 2 |")
    assert html == (
        '<div class="table-box" tabindex="0"><table><thead><tr><th class="center" scope="col">a</th>'
        '<th class="right" scope="col">b</th></tr></thead><tbody><tr><td class="center">1</td>'
        '<td class="right"><code>x|y</code></td></tr><tr><td class="center">2</td></tr></tbody></table>'
        "</div>")


def test_code_has_its_language_colours_and_a_copy_button(page):
    html = page.evaluate(RENDER, "```python\ndef f():\n\treturn 'a'  # why\n```")
    assert '<span>python</span><button class="small" type="button" aria-live="polite">Copy</button>' in html
    assert ('<span class="code-keyword">def</span> f():\n\t<span class="code-keyword">return</span> '
            '<span class="code-string">\'a\'</span>  <span class="code-comment"># why</span>') in html
    assert 'code-keyword">def<' in page.evaluate(RENDER, "text\n```python\ndef f"), "also where it was cut"
    assert "<span" not in page.evaluate(RENDER, "```brainfuck\nfor 1\n```").split("<pre")[1]


@pytest.mark.parametrize("address", ["https://a.example/b?c=1#d", "http://a.example/", "mailto:a@b.example"])
def test_links_to_other_pages_open_in_a_new_one(page, address):
    html = page.evaluate(RENDER, f"[the **text**]({address})")
    assert html == (f'<p><a href="{address}" target="_blank" rel="noopener noreferrer nofollow" '
                    f'title="{address}">the <strong>text</strong></a></p>')


def test_a_bare_address_is_a_link_without_the_full_stop(page):
    html = page.evaluate(RENDER, "see (https://a.example/b_c), <https://d.example/>.")
    assert 'href="https://a.example/b_c"' in html and 'href="https://d.example/"' in html


def test_an_image_is_a_link_to_it(page):
    html = page.evaluate(RENDER, "![a *cat*](https://a.example/cat.png)")
    assert "<img" not in html and ">a *cat*</a>" in html


@pytest.mark.parametrize("inside, text", [
    ("see https://b.example/c", "see https://b.example/c"),
    ("*<https://b.example/>* **b**", "<em>https://b.example/</em> <strong>b</strong>"),
    ("![a cat](https://b.example/cat.png)", "a cat")])
def test_a_link_stands_in_no_link(page, inside, text):
    html = page.evaluate(RENDER, f"[{inside}](https://a.example/)")
    assert html.count("<a ") == 1 and f'title="https://a.example/">{text}</a>' in html


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>",
    "[x](javascript:alert(1))", "[x](JaVaScRiPt:alert(1))", "[x](java\nscript:alert(1))",
    "[x](\x01javascript:a)",
    "[x](data:text/html,<script>alert(1)</script>)", "[x](vbscript:a)", "[x](//a.example)", "[x](/v1/models)",
    "<javascript:alert(1)>", "![x](https://a.example/x.png)", "![x](javascript:alert(1))",
    '[x](https://a.example "onclick=alert(1)")', "```\n<script>alert(1)</script>",
    "```html\n<img src=x onerror=a>\n```",
    "`<img src=https://a.example/x.png>`", "| <iframe src=https://a.example> |\n|---|\n| <object data=x> |",
    "<style>@import url(https://a.example)</style>", "<a href='javascript:alert(1)'>x</a>",
    "&lt;script&gt;alert(1)&lt;/script&gt;", "<base href=https://a.example>",
    "<meta http-equiv=refresh content=0>",
]
SHOW = """(text) => {
  const record = newChat();
  record.turns = [{ role: "user", content: text },
    { role: "assistant", content: text, reasoning: text, calls: [{ name: text, arguments: text }],
      figures: text, error: text }];
  record.title = text;
  chat.show(record);
  chat.keep();
}"""
ELEMENTS = {"A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI",
            "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"}


def test_hostile_text_loads_and_runs_nothing(visit, shared):
    page = visit(shared.url)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    for text in HOSTILE:
        page.evaluate(SHOW, text)
        assert page.locator(".user .text").text_content() == text
        parts = page.evaluate("""[...document.querySelectorAll(".markdown *")].map((node) => (
          [node.tagName, node.getAttributeNames().filter((name) => name.startsWith("on") || name === "style"),
           node.protocol ?? ""]))""")
        assert {tag for tag, _, _ in parts} <= ELEMENTS, text
        assert not any(names for _, names, _ in parts), text
        assert {protocol for _, _, protocol in parts} <= {"", "http:", "https:", "mailto:"}, text


MANY = 20000
HUGE = {
    "quotes": "> " * MANY, "lists": "\n".join(" " * (2 * depth) + "- a" for depth in range(300)),
    "brackets": "[" * MANY, "images": "![" * MANY, "links": "[a](" * MANY, "emphasis": "*a **b _c " * MANY,
    "closers": "*a " * MANY + "b* " * MANY, "ticks": " ".join("`" * count for count in range(1, 200)) * 5,
    "fences": "```\n" * MANY, "dollars": "$a" * MANY, "math": "\\[a \\(b " * MANY,
    "columns": "|" * MANY + "\n" + "|-" * MANY, "spaces": " " * MANY + "#" + " " * MANY,
    "addresses": "https://" * MANY, "entities": "&amp" * MANY, "rules": "- " * MANY + "a",
    "one word": "a" * 10 * MANY, "parts": "`a` " * 75000, "parts of a heading": "# " + "`a` " * 75000,
    "parts of an item": "- " + "`a` " * 75000, "parts of a cell": "|a|\n|-|\n|" + "`a` " * 75000,
    "parts of a link": "[" + "`a` " * 75000 + "](https://a.example)",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_texts_make_no_deep_tree(page, name):
    assert page.evaluate("""(text) => {
      const root = element("div"), view = new MarkdownView(root);
      view.push(text);
      view.end();
      return [root.textContent.length > 0, root.querySelector(Array(64).fill("*").join(" > "))];
    }""", HUGE[name]) == [True, None]


DOCUMENT = "\n".join(text for text in CASES) + """

1. one

   more of one
2. two

| a | b |
|---|---|
| 1 | 2 |

- x
1.5 is no item

```js
const a = "b";
```
after ~~~
~~~
open [a](https://a.example) **x

```js
if (a) {
```more
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_stream_always_shows_what_the_text_so_far_would_show_at_once(page, seed):
    chance = random.Random(seed)
    text = "\n\n".join(chance.sample([*CASES, DOCUMENT], 8)) if seed else DOCUMENT
    cuts = range(len(text))  # the first document is cut everywhere
    if seed:
        cuts = sorted(chance.choices(cuts, k=chance.randrange(2, 60)))
    assert page.evaluate(STREAM, [text, [*cuts]]) is True


@pytest.mark.parametrize("text", [
    "*em* word " * 900, "line *em*\n" * 900, "😀" * 4500, "- " + "a `b` " * 1500,
    "# " + "a " * 4000 + "\n===", "| a |\n|---|\n| " + "*b* c " * 1500])
def test_long_text_is_divided_and_streams_to_the_same(page, text):
    cuts = sorted(random.Random(0).sample(range(len(text)), 20))
    assert page.evaluate(STREAM, [text, cuts]) is True
    html = page.evaluate(RENDER, text)
    assert "<span>" in html and "\ufffd" not in html and html.encode(), "no character is cut in two"


GROWING = {
    "list": ("", "- item *{}*\n"), "loose list": ("- first\n\n", "- item *{}*\n\n"),
    "deep list": ("- first\n  - second\n", "    - item *{}*\n"),
    "table": ("| a | b |\n|---|---|\n", "| {} | *b* |\n"), "quote": ("", "> line *{}*\n>\n"),
    "paragraph": ("", "line *{}*\n"),
}


@pytest.mark.parametrize("name", GROWING)
def test_the_work_for_one_more_line_does_not_grow_with_the_text(page, name):
    """What is made anew is what the last line changes; of a long paragraph, its last part."""
    start, line = GROWING[name]
    made = page.evaluate("""([start, lines, more]) => lines.map((text) => {
      const root = element("div"), view = new MarkdownView(root), watch = new MutationObserver(() => {});
      view.text = start + text;
      view.render(false);
      watch.observe(root, { childList: true, subtree: true });
      view.text += more;
      view.render(false);
      const added = watch.takeRecords().flatMap(({ addedNodes }) => [...addedNodes]);
      return added.reduce((sum, node) => sum + 1 + (node.querySelectorAll?.("*").length ?? 0), 0);
    })""", [start, ["".join(line.format(n) for n in range(count)) for count in (1000, 3000)], line.format(0)])
    assert all(0 < count < (1000 if name == "paragraph" else 10) for count in made)


def test_after_a_slow_frame_the_text_waits(page):
    """Of the time, a quarter at most goes into showing text; the clock and the frames are the test's."""
    shown = page.evaluate("""() => {
      const real = [window.requestAnimationFrame, performance.now], frames = [];
      let clock = 0;
      window.requestAnimationFrame = (draw) => frames.push(draw);
      performance.now = () => clock;
      try {
        const root = element("div"), view = new MarkdownView(root), shown = [];
        for (const time of [0, 150, 299, 399, 400]) {
          clock = time;
          view.push("a", () => { clock += 100; });
          frames.splice(0).forEach((draw) => draw());
          shown.push(root.textContent);
        }
        return shown;
      } finally { [window.requestAnimationFrame, performance.now] = real; }
    }""")
    assert shown == ["a", "a", "a", "a", "aaaaa"]
