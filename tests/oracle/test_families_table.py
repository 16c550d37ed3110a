"""Every family of ``evals/results/2026-11-29-families.json``, measured again.

    pytest -m slow tests/oracle/test_families_table.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]
pytest.importorskip("transformers", reason="these families are transformers' (extra: oracle)")

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "evals/results/2026-11-29-families.json").read_text())
RECIPES = ("int8", "int4-rtn", "int4-gptq")
OTHERWISE = {"roc_bert"}
"""Calibrated it isn't nearer than rounded: every token of it sees the whole text, which its windows cut."""


@pytest.mark.parametrize("family", TABLE)
def test_a_family_is_as_the_table_says(family, tmp_path):
    out = tmp_path / "row.json"
    subprocess.run([sys.executable, ROOT / "evals/peers/families.py", out, family], check=True)
    row, stated = json.loads(out.read_text())[family], TABLE[family]
    assert (row["built"] == "yes") == (stated["built"] == "yes"), row["built"]
    if stated["built"] != "yes":
        return
    assert (row["inspect"] == "yes") == (stated["inspect"] == "yes"), row["inspect"]
    for recipe in RECIPES:
        got, cell = row[recipe], stated[recipe]
        assert ("error" in got) == ("error" in cell), got
        if "error" in cell:
            continue
        assert (got["quantized"], got["layers"], got["kept"]) == (
            cell["quantized"], cell["layers"], cell["kept"])
        for reader in ("kl", "transformers"):
            if isinstance(cell[reader], str):
                assert isinstance(got[reader], str)
            else:  # another CPU adds up in another order
                assert got[reader] == pytest.approx(cell[reader], rel=0.2, abs=1e-4)
    if not any("error" in row[recipe] or isinstance(row[recipe]["kl"], str) for recipe in RECIPES):
        assert row["int8"]["kl"] < row["int4-rtn"]["kl"]
        assert family in OTHERWISE or row["int4-gptq"]["kl"] < row["int4-rtn"]["kl"]
