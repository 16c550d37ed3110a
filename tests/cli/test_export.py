"""``quantkit export``."""

from __future__ import annotations


def test_export(cli, cli_json, checkpoint, tmp_path):
    done = cli("export", checkpoint, "--to", "gptq", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "14 of 14 in format gptq" in done.stdout and "--for vllm" in done.stdout
    assert cli("verify", tmp_path / "out").exit_code == 0
    facts = cli_json("inspect", tmp_path / "out")
    assert {row["format"] for row in facts["layers"]} == {"gptq"}
    result = cli_json("export", checkpoint, "--to", "bnb-int8", tmp_path / "json")
    assert result["format"] == "bnb-int8" and len(result["layers"]) == 14
    text = cli("generate", tmp_path / "out", "Once", "-n", "4")
    assert text.exit_code == 0 and text.stdout == cli("generate", checkpoint, "Once", "-n", "4").stdout


def test_refusals(cli, checkpoint, tiny, tmp_path):
    for arguments, words in (((checkpoint, "--to", "awq"), "holds 4 bits"),
                             ((checkpoint, "--to", "gptqq"), "gptq"),
                             ((tiny, "--to", "gptq"), "is not quantized")):
        result = cli("export", *arguments, tmp_path / "out")
        assert result.exit_code != 0 and words in result.stderr and "next: " in result.stderr
    assert not list(tmp_path.iterdir())
