"""Tables that fit, bytes that read well, JSON that is JSON."""

import math

import pytest

from quantkit.cli import present


def test_a_table_is_aligned():
    text = present.table(["name", "n"], [["a", 1], ["longer", 22]], right=[1])
    assert text.splitlines() == ["name     n", "a        1", "longer  22"]


def test_a_table_never_exceeds_the_limit_and_keeps_the_ends_of_names():
    rows = [[f"model.layers.{i}.self_attn.q_proj", "x" * 30, "y" * 20] for i in range(3)]
    text = present.table(["layer", "a", "b"], rows, limit=80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{i}.self_attn.q_proj" in text for i in range(3))
    assert text.splitlines()[1].startswith("…")


def test_json_refuses_nan(capsys):
    present.print_json({"ü": 1})
    assert capsys.readouterr().out == '{\n  "ü": 1\n}\n'
    with pytest.raises(ValueError):
        present.print_json(math.nan)


def test_wrapped_folds_under_itself():
    lines = present.wrapped("label", "word " * 40).splitlines()
    assert len(lines) > 1 and all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("label         word") and lines[1].startswith(" " * 14 + "word")
