"""Tables of quality and speed: what they say of each number."""

import pytest

from quantkit.evaluation.report import quality_grids, speed_grids
from quantkit.evaluation.report.base import TextGrid
from quantkit.evaluation.result import PairedDifference
from quantkit.evaluation.speed.results import DecodeSpeed, MemoryUse, SpeedSweep, Spread


def test_all_variants_with_tails_and_without_empty_columns(rich, make_result):
    grid = quality_grids.variants(rich)
    assert [head.partition("\n")[0] for head in grid.heads] == [
        "variant", "size", "decode", "same token", "KL", "cost", "perplexity", "prefill", "KL median",
        "KL 99%", "KL 99.9%", "flips", "perplexity a word", "bits", "KV", "KV cache", "peak"]
    assert len(grid.rows) == 15 and grid.dimmed == {2, 9, 10, 11}
    assert grid.rows[3][0] == "int8 kv none\nrtn int8 channel sym"
    assert grid.rows[3][4:6] == ("0.00310\n0.00291–0.00329", "negligible") and grid.rows[0][5] == "reference"
    heads = quality_grids.variants(make_result()).heads
    assert not any(head.startswith(("KV", "flips", "run by")) for head in heads)


def test_a_peer_is_named_and_what_it_lacks_is_blank(rich):
    peer = rich.rows[4]
    peer.tool, peer.metrics = "llama.cpp b9821", {"perplexity": peer.metrics["perplexity"]}
    grid = quality_grids.variants(rich)
    assert grid.heads[-1] == "run by" and grid.rows[4][-1] == "llama.cpp b9821"
    assert grid.rows[4][2:6] == ("–",) * 4 and grid.rows[3][-1] == "–"


def test_one_row_a_text(rich):
    grid = quality_grids.by_text(rich)
    assert [row[0] for row in grid.rows] == ["prose", "code", "dialogue", "german"]
    assert len(grid.heads) == 15, "the reference's own KL is 0"
    assert quality_grids.texts(rich)[0].heads == ("variant", "prose", "code", "dialogue", "german")


@pytest.mark.parametrize(("metric", "verdict", "epsilon", "words"), [
    ("kl_mean", "indistinguishable", 0.005, "indistinguishable within 0.0050 nats"),
    ("arc_easy/acc", "indistinguishable", 0.02, "indistinguishable within 2.0 points"),
    ("arc_easy/acc", "indistinguishable", None, "indistinguishable"),
    ("arc_easy/acc", "worse", 0.02, "worse"), ("kl_mean", "undecided", None, "undecided")])
def test_verdicts(rich, metric, verdict, epsilon, words):
    test = PairedDifference(metric=metric, difference=0.01, low=0.0, high=0.02, epsilon=epsilon,
                            verdict=verdict)
    assert quality_grids.verdict(rich, test) == words


def test_differences_are_in_pairs_and_say_how_they_were_tested(rich):
    grid = quality_grids.differences(rich)
    assert grid.heads[:3] == ("variant", "KL\n160 pairs", "arc_easy · acc\n400 pairs")
    assert grid.notes[0] == "p of KL: sign flips over windows" and grid.notes[1].endswith("McNemar, exact")
    assert len(grid.rows) == 14, "not the reference"
    value, within, change, p = grid.rows[2][1].split("\n")
    assert (value, within, p) == ("indistinguishable", "within ±0.0050 nats", "p 0.00010")
    assert change == "+0.00310 (+0.00279 to +0.00341)"
    assert len(quality_grids.differences(rich, tasks=False).heads) == 2


def test_differences_on_a_text_name_it(rich):
    rich.rows[1].differences = [PairedDifference(metric="flips", text="code", difference=0.1, low=0.05,
                                                 high=0.15, verdict="worse")]
    grid = quality_grids.differences(rich)
    assert grid.heads[-1] == "flips on code", "what is of all texts stands before"
    assert grid.rows[0][-1] == "small\n+10.0 (+5.00 to +15.0)" and grid.rows[1][-1] == "–"


def test_tasks_show_what_the_pairs_say(rich):
    grid = quality_grids.tasks(rich)
    assert grid.heads == ("variant", "arc_easy\nacc", "piqa\nacc", "hellaswag\nacc_norm",
                          "lambada_openai\nacc")
    assert grid.rows[0][1] == "68.2%\n64.8–71.6"
    assert grid.rows[-1][1] == "65.9%\n-2.32 (-3.52 to -1.22), worse"
    assert quality_grids.tails(rich).heads[-1] == "flips", "tails and flips are no tasks"


def test_nothing_measured_makes_no_tables(make_result, make_row):
    result = make_result([make_row("one", prefill=None)])
    assert quality_grids.tails(result) is None and quality_grids.tasks(result) is None
    assert quality_grids.by_text(result) is None and quality_grids.differences(result) is None
    assert speed_grids.decode_grids(result) == speed_grids.prefill_grids(result) == []
    assert speed_grids.memory(result) is None and speed_grids.gaps(result) is None


def test_speed_by_batch_and_by_context(rich):
    batch, context = speed_grids.decode_grids(rich)
    assert batch.heads == ("variant", "batch 1", "batch 2", "batch 4", "batch 8")
    assert context.heads == ("variant", "128", "1,024", "4,096")
    assert batch.rows[0][1] == context.rows[0][1] == "19.5\n71% of read"


def test_what_was_left_out_says_why(make_result, make_row):
    row = make_row("one")
    row.speed = SpeedSweep(decode=(
        DecodeSpeed(batch=1, context=128, tok_s=Spread(median=10, low=9, high=11)),
        DecodeSpeed(batch=8, context=128, left_out="needs 3 GB, there are 2")))
    grid, = speed_grids.decode_grids(make_result([row]))
    assert grid.rows == (("one", "10.0", "–"),)
    assert grid.notes == ("Not measured: needs 3 GB, there are 2",)


def test_memory_has_a_column_a_context_and_no_guesses(make_result, make_row):
    row = make_row("one")
    row.speed = SpeedSweep(memory=MemoryUse(weights=10_000_000, kv_by_context=((128, 1_000_000),)))
    assert speed_grids.memory(make_result([row])).heads == ("variant", "weights", "KV 128")


def test_the_roofline_as_a_table(rich):
    grid = speed_grids.roofline_grid(rich.roofline[0])
    assert grid.rows[0] == ("q+k+v, 1 row", "0.998", "29.9", "103 µs\npredicted 80.2 µs", "78%",
                            "memory\ncompute from 24 rows")
    assert grid.rows[-1][0] == "attention, 1 row, 4,096 tokens" and len(grid.rows) == 22
    assert "38.4 GB/s read" in grid.notes[0] and "1.70 T operations/s in int8" in grid.notes[0]


def test_empty_columns_go():
    grid = TextGrid("t", ("a", "b", "c"), (("x", "–", "1"), ("y", "", "2")), ("note",), frozenset({1}))
    assert grid.filled == TextGrid("t", ("a", "c"), (("x", "1"), ("y", "2")), ("note",), frozenset({1}))
