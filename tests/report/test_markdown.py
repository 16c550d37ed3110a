"""The report in Markdown."""

from quantkit.evaluate.metrics import Interval
from quantkit.report.markdown import render


def test_every_model_is_in_every_table(make_result):
    text = render(make_result(question="Why?"))
    for name in ("smollm2", "int8", "int4", "nf4"):
        assert sum(line.startswith(f"| {name} |") for line in text.splitlines()) == 2
        assert f"**{name}**" in text
    assert "gptq int4 g64 sym" in text and "(plot.svg)" in text and "Light scatters." in text
    assert "torch × 210" in text and "reference × 210" in text


def test_a_table_line_has_as_many_cells_as_the_head(make_result, make_row):
    text = render(make_result([make_row("a|b", "odd|method")]))
    lines = [line.replace(r"\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines[:3]} == {11}


def test_what_a_model_wrote_is_no_markup(make_result, make_row):
    answer = "# title\n![x](http://example.org/x.png) <script>\n\n| a |"
    text = render(make_result([make_row("<b>_m_", answer=answer)], question="<q>?"))
    assert "<script>" not in [line for line in text.splitlines() if not line.startswith("    ")]
    assert all(line.startswith("    ") for line in text.splitlines() if "example.org" in line)
    assert "<b>" not in text and r"\_m\_" in text and "<q>" not in text


def test_noise_floor_and_protocol(make_result):
    result = make_result(exact=[Interval(0.0011, 0.001, 0.0012), Interval(0.0031, 0.003, 0.0032)])
    text = render(result)
    assert "| int8 | 0.00310<br><sub>0.00300–0.00320</sub> | +0.00200 |" in text
    assert result.protocol.fingerprint in text
    assert "Noise floor" not in render(make_result())
