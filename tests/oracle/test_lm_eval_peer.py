"""The script that puts lm-eval's ``hf`` beside ours, on a tiny model and tasks of every kind."""

import json
import subprocess
import sys

import pytest

from quantkit.testing import tiny_model

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: lm-eval)")

ROWS = {"arc_easy.jsonl": [{"query": f"Question: the {word}?", "choices": ["a cat", "the dog", "it", "a hat"],
                            "gold": 1} for word in ("man", "mat", "house")],
        "winogrande.jsonl": [{"context_options": ["the cat so it", "the dog so it"],
                              "continuation": "sat on the mat.", "gold": 0}] * 2,
        "lambada_openai.jsonl": [{"context": "the cat sat on the", "continuation": "mat"}] * 2}


def test_both_sides_and_all_that_is_compared(root, tmp_path):
    folder = tiny_model(tmp_path / "tiny", dtype="float32")
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, root / "evals" / "peers" / "lm_eval_hf.py", "--model", folder, "--tasks",
         "arc_easy,winogrande,lambada_openai", "--task-data", tmp_path, "--dtypes", "float32,bfloat16",
         "--hf-batch", "2,3", "--turns", "2", "--json", tmp_path / "out.json"],
        capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "out.json").read_text())
    assert [(row["task"], row["dtype"], row["items"]) for row in results["rows"]] == [
        (task, dtype, items) for dtype in ("float32", "bfloat16")
        for task, items in (("arc_easy", 3), ("winogrande", 2), ("lambada_openai", 2))]
    for row in results["rows"][:3]:
        assert set(row["same"].values()) == {row["items"]} and row["largest_difference"] < 1e-4
        assert set(row["wall_s"]) == set(row["cpu_s"]) == {"quantkit", "hf batch 2", "hf batch 3"}
        assert row["hf_batch"] in ("2", "3") and all(len(times) == 2 for times in row["wall_s"].values())
    assert done.stdout.count("| float32 |") == 3 and "choose the same in 2 of 2" in done.stdout
    assert results["machine"]["cpu"] and results["model"] == str(folder)
