"""``--draft`` and ``bench drafts``: what is drafted is told, and every refusal is in words."""

from __future__ import annotations

import json

import pytest

from quantkit.evaluation.bench import drafts as module
from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.drafting.draft_model import LowBitDrafter
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


def test_the_short_way_to_write_a_drafter():
    assert parse_drafter("none") is None
    assert parse_drafter(" ngram ") == NgramDrafter()
    assert parse_drafter("ngram(20, min_match=2)") == NgramDrafter(max_tokens=20, min_match=2)
    assert parse_drafter("self(a/b-c.d, max_tokens=3)") == LowBitDrafter(checkpoint="a/b-c.d", max_tokens=3)
    for path in ("/a b/int4 (new), x=1", "C:\\models", "3"):
        assert parse_drafter(f'self("{path}")') == LowBitDrafter(checkpoint=path)
        assert parse_drafter(f'self(max_tokens=3, checkpoint="{path}")') == LowBitDrafter(
            checkpoint=path, max_tokens=3)


@pytest.mark.parametrize(("text", "message"), [
    ("ngran", "no drafter is called 'ngran'"), ("ngram(", "can't be read"), ("ngram(1, 2)", "can't be read"),
    ('self("a)', "can't be read"), ('self("")', "is empty"), ('self("a"b)', "not all in quotes"),
    ("ngram(1, max_tokens=2)", "given twice"), ("ngram(most=2)", "has no option 'most'"),
    ("ngram(33)", "max_tokens: Input should be less than or equal to 32"),
    ("ngram(max_match=2)", "min_match 3 is more than max_match 2"), ("model", "checkpoint: Field required"),
    ("none(2)", "no drafter is called 'none'")])
def test_what_can_not_be_read(text, message):
    with pytest.raises(UsageError) as refused:
        parse_drafter(text)
    assert message in f"{refused.value.what}: {refused.value.why}"


def test_generate_says_how_many_were_right(cli, tiny):
    prompt = "the cat the cat the cat the cat"
    plain = cli("generate", tiny, prompt, "-n", 60, "--ignore-eos", "--json")
    drafted = cli("generate", tiny, prompt, "-n", 60, "--ignore-eos", "--json", "--draft", "ngram(4)")
    before, after = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert after["token_ids"] == before["token_ids"]
    assert before["drafted_tokens"] == 0 < after["drafted_tokens"]
    shown = cli("generate", tiny, prompt, "-n", 60, "--ignore-eos", "--draft", "ngram(4)")
    assert "drafted tokens right" in shown.stderr and shown.stdout == plain_text(before)


def plain_text(report):
    return report["text"] + "\n"


def test_generate_refuses_before_it_loads(cli, tmp_path):
    result = cli("generate", tmp_path / "nothing", "a", "--draft", "ngran")
    assert result.exit_code == 2 and "no drafter is called 'ngran'" in result.stderr
    assert "ngram" in result.stderr


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A tiny model with room for the texts that are measured."""
    return tiny_model(tmp_path_factory.mktemp("roomy") / "tiny", max_position_embeddings=8192)


def test_what_drafts_gain(cli, roomy, tmp_path):
    out = tmp_path / "drafts.json"
    result = cli("bench", "drafts", roomy, "--draft", "ngram(4)", "--max-tokens", 12, "--repeats", 2, "-q",
                 "--out", out, "--kv", "int8")
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [(case["task"], case["drafter"]) for case in report["cases"]] == [
        (task, drafter) for task in ("chat", "edit", "summary") for drafter in ("none", "ngram(4)")]
    for case in report["cases"]:
        speeds, gains = case["tok_s"], case["gain"]
        assert 0 < speeds["low"] <= speeds["median"] <= speeds["high"]
        assert 0 < gains["low"] <= gains["median"] <= gains["high"]
        assert case["tokens_a_step"] >= 1 and 0 <= case["accepted"] <= case["drafted"]
    assert report["kv"] == "int8" and "tokens/step" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_drafter_that_changes_tokens_is_reported(cli, roomy, monkeypatch):
    run = module._Runs.run

    def changed(self, prompt, timed):
        run(self, prompt, timed)
        if self._engine.speculator is not None:
            self.token_ids = [*self.token_ids[:-1], 5]

    monkeypatch.setattr(module._Runs, "run", changed)
    result = cli("bench", "drafts", roomy, "--max-tokens", 4, "--repeats", 1, "-q")
    assert result.exit_code == 1 and "ngram changes what is generated" in result.stderr


def test_a_model_that_gets_no_drafts(cli, tmp_path):
    folder = tiny_model(tmp_path / "capped", "gemma2", max_position_embeddings=8192)
    result = cli("bench", "drafts", folder, "--max-tokens", 4, "--repeats", 1, "-q")
    assert result.exit_code == 2 and "gets no drafts" in result.stderr
