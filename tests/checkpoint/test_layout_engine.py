"""The table "What loads where" has every layout and every engine, and its cells say what verify says."""

from __future__ import annotations

import ast
import json
from collections import defaultdict

import pytest

from quantkit.checkpoint.engines import ENGINES, check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.gguf.export import export_gguf
from quantkit.plugins.manager import registry
from quantkit.runtime.verify import verify
from quantkit.support.errors import QuantkitError
from tests.helpers.layouts import ROOT, cases, generator, maker

CASES = list(cases())
LAYOUTS = generator()
DATA = LAYOUTS.read()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return maker(tmp_path_factory.mktemp("layouts"))


def test_every_format_has_a_row_and_every_engine_a_column():
    assert {case.rule["format"] for case in CASES} == set(registry("formats"))
    assert set(DATA["engines"]) == {"quantkit", *ENGINES, "gguf"}
    for row in DATA["layouts"]:
        assert set(row) == {"title", "cases", *DATA["engines"]}, row["title"]


def test_the_page_has_the_table_as_it_is():
    page = LAYOUTS.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- layouts -->") == 1
    assert LAYOUTS.filled(page) == page, "run: python docs/generate_layouts.py"


def test_every_footnote_is_used_and_every_cell_is_of_one_kind():
    cells = [row[engine] for row in DATA["layouts"] for engine in DATA["engines"]]
    assert {cell["note"] for cell in cells if "note" in cell} == set(DATA["notes"])
    for cell in cells:
        allowed = {"same": {"unless"}, "loads": {"why"}}.get(LAYOUTS.kind_of(cell), {"text"})
        assert cell.keys() <= {LAYOUTS.kind_of(cell), "note"} | allowed, cell


def measured(name: str, engine: str) -> dict[str, list[float]]:
    """Of a result of ``engines.py exports``: format → the shares of equal tokens of what an engine loaded."""
    shares = defaultdict(list)
    for row in json.loads((ROOT / "evals" / "results" / name).read_text(encoding="utf-8"))["rows"]:
        if row["engine"] == engine and row["loads"]:
            shares[row["format"]].append(row["float32"]["share"])
    return shares


def test_what_shows_a_cell_is_there():
    """A test by its file and name, or a file of evals/results in which the engine was seen."""
    for row in DATA["layouts"]:
        for engine in DATA["engines"]:
            shown_by = row[engine].get("same") or row[engine].get("loads")
            if shown_by and shown_by.endswith(".json"):
                shares = measured(shown_by, engine)
                for form in {rule["format"] for rule in row["cases"]}:
                    assert (max(shares[form]) == 1) >= ("same" in row[engine]), f"{form} in {engine}"
            elif shown_by:
                file, _, name = shown_by.partition("::")
                source = (ROOT / "tests" / file).read_text(encoding="utf-8")
                defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
                assert name in defined, f"{row['title']} in {engine}: {shown_by}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify_says_the_same(make, case, engine):
    cell = case.row[engine]
    told = {}
    with open_checkpoint(make(case)) as opened:
        for device in ("cuda", "cpu"):
            checks = check_engine(engine, opened, device)
            told[device] = {status: [check.detail for check in checks if check.status == status]
                            for status in ("failed", "note")}
    kind = LAYOUTS.kind_of(cell)
    words = cell.get("unless") if kind in ("same", "loads") else cell[kind]
    if kind == "unrun":
        assert not told["cuda"]["failed"]
        assert any(words in detail for detail in told["cpu"]["failed"] + told["cpu"]["note"]), told["cpu"]
    elif words:
        assert any(words in detail for detail in told["cuda"]["failed"]) and told["cpu"]["failed"], told
    else:
        assert not told["cuda"]["failed"] and not told["cpu"]["failed"], told


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_export_to_gguf_says_the_same(make, case, tmp_path):
    cell = case.row["gguf"]
    if "refused" not in cell:
        assert export_gguf(str(make(case)), tmp_path / "m.gguf").out.is_file()
        return
    with pytest.raises(QuantkitError) as caught:
        export_gguf(str(make(case)), tmp_path / "m.gguf")
    assert cell["refused"] in f"{caught.value} {caught.value.why}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantkit_verifies_each(make, case):
    assert verify(make(case)).ok and "refused" not in case.row["quantkit"]
