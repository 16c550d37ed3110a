"""The report in Markdown."""

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.markdown import render


def test_every_model_is_in_every_table(make_result):
    text = render(make_result(question="Why?"))
    for name in ("smollm2", "int8", "int4", "nf4"):
        assert sum(line.startswith((f"| {name} |", f"| {name}<br>")) for line in text.splitlines()) == 4
        assert f"**{name}**" in text
    assert "gptq int4 g64 sym" in text and "(frontier.svg)" in text and "Light scatters." in text
    assert "torch × 210" in text and "reference × 210" in text


def test_a_table_line_has_as_many_cells_as_the_head(make_result, make_row):
    text = render(make_result([make_row("a|b", "odd|method")]))
    tables = [part.replace(r"\|", "").splitlines() for part in text.split("\n\n") if part.startswith("| ")]
    assert len(tables) == 4
    for lines in tables:
        assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
        assert lines[0].count("|") <= 5, "a phone shows no more"


def test_what_a_model_wrote_is_no_markup(make_result, make_row):
    answer = "# title\n![x](http://example.org/x.png) <script>\n\n| a |"
    text = render(make_result([make_row("<b>_m_", answer=answer)], question="<q>?"))
    assert "<script>" not in [line for line in text.splitlines() if not line.startswith("    ")]
    assert all(line.startswith("    ") for line in text.splitlines() if "example.org" in line)
    assert "<b>" not in text and r"\_m\_" in text and "<q>" not in text


def test_a_kernel_s_name_is_no_markup(make_result, make_row):
    row = make_row("one")
    row.kernels = {"prefill": {"a|b": 1}, "decode": {"w8_a8_<b>": 2}}
    text = render(make_result([row]))
    assert r"| one | a\|b × 1 | w8\_a8\_&lt;b> × 2 |" in text


def test_noise_floor_and_protocol(make_result):
    result = make_result(exact=[Interval(0.0011, 0.001, 0.0012), Interval(0.0031, 0.003, 0.0032)])
    text = render(result)
    assert "| int8 | 0.00310<br><sub>0.00300–0.00320</sub> | +0.00200 |" in text
    assert result.protocol.fingerprint in text
    assert "Noise floor" not in render(make_result())


def test_the_headline_and_the_command_come_first(make_result):
    text = render(make_result(command="quantkit eval smollm2 'a b' --note '`x`'"))
    title, _, *lines = text.splitlines()
    assert title.startswith("# ")
    assert lines[0].startswith("- **Take int8: 1.65 times smaller, 1.50 times as fast, ")
    assert lines[4] == "Reproduce: `` quantkit eval smollm2 'a b' --note '`x`' ``"
    assert "Reproduce" not in render(make_result())
    places = [text.index(head) for head in ("KL<br>", "top-1 |", "decode<br>", "perplexity |")]
    assert places == sorted(places)


def test_no_table_is_wider_than_a_phone(make_result):
    from quantkit.evaluation.metric_table import MetricInfo

    result = make_result()
    for key in ("calibration", "agreement", "surprise"):
        result.metrics[key] = MetricInfo(key, "", "lower", "run", "quantkit-mine")
        for row in result.rows:
            row.metrics[key] = Interval(0.5, 0.25, 0.75)
    heads = [line for line in render(result).splitlines() if line.startswith("| variant |")]
    shown = [[cell.partition("<br>")[0].strip() for cell in head.strip("| ").split(" | ")[1:]]
             for head in heads]
    assert {key for head in shown for key in head} >= {"calibration", "agreement", "surprise", "perplexity"}
    for head in shown:
        assert len(head) <= 3 and (len(head) == 1 or sum(
            max(map(len, cell.split())) for cell in head) <= 20), head


def test_all_that_was_measured_has_a_section(rich):
    text = render(rich)
    heads = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["KL by token", "Other measurements", "Size", "Quality by text",
                     "Against the reference, in pairs", "Tasks", "Decode", "Prefill", "Memory", "Roofline",
                     "Kernels", "Answers to “Why is the sky blue?”", "Protocol"]
    for piece in ("0.00310", "| 6.76% |", "-2.32 (-3.52 to -1.22), worse", "within ±0.0050 nats",
                  "71% of read", "predicted 80.2 µs", "1.34 GB"):
        assert piece in text, piece


def test_long_tables_are_folded_and_short_ones_are_not(rich):
    text = render(rich)
    assert text.count("<details>") == text.count("</details>") > 8
    assert "<details><summary>Tasks: 15 rows</summary>" in text
    rich.rows = rich.rows[:3]
    assert "<summary>Tasks" not in render(rich)


def test_no_new_table_is_wider_than_a_phone(rich):
    heads = [line for line in render(rich).splitlines() if line.startswith(("| variant |", "| operator |"))]
    assert len(heads) > 20
    for line in heads:
        assert line.count("|") <= 5, line


def test_names_of_texts_and_operators_are_no_markup(rich):
    rich.rows[0].texts = {"<b>|_x_": rich.rows[0].metrics}
    rich.roofline[0] = rich.roofline[0].model_copy(update={"label": "<i>|"})
    text = render(rich)
    assert "<b>" not in text and "<i>" not in text
    assert r"&lt;b>\|\_x\_" in text and "Roofline of &lt;i&gt;|" in text
