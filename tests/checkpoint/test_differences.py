"""In what two runs differ: the fields that were chosen, in words and few lines."""

from __future__ import annotations

from quantkit.checkpoint.differences import SHOWN, changed_lines, differences, pinned

HASH = "3f" * 32
OTHER = "9b" * 32


def lines(then, now) -> list[str]:
    return [str(one) for one in differences(then, now)]


def test_leaves_are_named():
    assert lines({"a": [1, {"b": 2}], "c": 0}, {"a": [1, {"b": 3}], "d": 0}) == [
        "a[1].b: 2 → 3", "d: none → 0", "c: 0 → none"]
    assert lines({"a": 1}, {"a": 1}) == []


def test_entries_of_lists_are_known_by_their_names_wherever_they_stand():
    rules = [{"match": "lm_head"}, {"match": "*", "spec": {"bits": 4}}]
    more = [{"match": "*.v_proj", "method": "rtn"}, rules[0], {"match": "*", "spec": {"bits": 3}}]
    assert lines({"rules": rules}, {"rules": more}) == [
        'rules[*.v_proj]: none → {"match": "*.v_proj", "method": "rtn"}', "rules[*].spec.bits: 4 → 3"]
    assert lines({"rules": rules}, {"rules": rules[::-1]}) == [
        "rules[order]: [lm_head] [*] → [*] [lm_head]"]
    twice = [{"match": "*", "x": 1}, {"match": "*", "x": 2}]
    assert lines(twice, [twice[0], {"match": "*", "x": 3}]) == ["[1].x: 2 → 3"]
    assert lines([1, 2], [1]) == [": [1, 2] → [1]"]


def test_hashes_and_long_values_are_shortened():
    assert changed_lines({"source": {"files": {"model.safetensors": HASH}}},
                {"source": {"files": {"model.safetensors": OTHER}}}) == [
        "the model's model.safetensors: 3f3f3f3f3f3f… → 9b9b9b9b9b9b…"]
    (line,) = changed_lines({"recipe": {"description": "a" * 100}}, {"recipe": {"description": "b" * 30}})
    assert line == f"recipe: description: {'a' * 32}…{'a' * 15} → {'b' * 30}"


def test_what_follows_from_a_choice_is_left_out():
    then = {"recipe": {"calibration": {"seed": 0}},
            "calibration": {"seed": 0, "sha256": HASH, "coverage": {"distinct": 5}}}
    now = {"recipe": {"calibration": {"seed": 1}},
           "calibration": {"seed": 1, "sha256": OTHER, "coverage": {"distinct": 6}}}
    assert changed_lines(then, now) == ["recipe: calibration.seed: 0 → 1",
                               "calibration's tokens: 3f3f3f3f3f3f… → 9b9b9b9b9b9b…"]
    assert changed_lines({"calibration": {"coverage": {"distinct": 5}}},
                {"calibration": {"coverage": {"distinct": 6}}}) == ["calibration: coverage.distinct: 5 → 6"]


def test_few_lines_the_weightiest_first():
    then = {"source": {"files": {f"{i}.safetensors": HASH for i in range(40)}, "uri": "a"},
            "quantkit_version": "1", "layout": 1}
    now = {"source": {"files": {f"{i}.safetensors": OTHER for i in range(40)}, "uri": "b"},
           "quantkit_version": "2", "layout": 2}
    said = changed_lines(then, now)
    assert len(said) == SHOWN
    assert said[:2] == ["layout: 1 → 2", "quantkit: 1 → 2"] and "model: a → b" in said
    assert said[-1] == "and 36 more"


def test_the_names_of_fields():
    then = {"plugins": {"quantkit": "1", "quantkit-hqq": "1"}, "quantkit_version": "1", "format": "gptq",
            "calibration": {"files": [{"name": "a.txt", "sha256": HASH}]}, "exported": {"uri": "a"}}
    now = {"plugins": {"quantkit": "2", "quantkit-hqq": "2"}, "quantkit_version": "2", "format": "awq",
           "calibration": {"files": [{"name": "a.txt", "sha256": OTHER}]}, "exported": {"uri": "b"}}
    assert changed_lines(then, now) == ["quantkit: 1 → 2", "plugin quantkit-hqq: 1 → 2",
                                        "checkpoint: uri: a → b", "--to: gptq → awq",
                                        "calibration file [a.txt].sha256: 3f3f3f3f3f3f… → 9b9b9b9b9b9b…"]


def test_versions_that_would_end_the_run():
    then = {"quantkit_version": "0.1.0", "plugins": {"quantkit": "0.1.0", "hqq": "1", "gone": "3"}}
    now = {"quantkit_version": "0.2.0", "plugins": {"quantkit": "0.2.0", "hqq": "2"}}
    assert pinned(then, now) == ["quantkit 0.1.0", "hqq 1"]
    assert pinned(now, now) == []
