"""``quantkit export``."""

from __future__ import annotations


def test_export(cli, cli_json, checkpoint, tmp_path):
    done = cli("export", checkpoint, "--to", "gptq", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "14 of 15 in format gptq" in done.stdout and "--for vllm" in done.stdout
    assert "decoded       model.embed_tokens, to 16 bits" in done.stdout
    assert cli("verify", tmp_path / "out").exit_code == 0
    facts = cli_json("inspect", tmp_path / "out")
    assert {row["format"] for row in facts["layers"] if "layers" in row["name"]} == {"gptq"}
    result = cli_json("export", checkpoint, "--to", "bnb-int8", tmp_path / "json")
    assert result["format"] == "bnb-int8" and result["decoded"] == ["model.embed_tokens"]
    assert [row["name"] for row in result["layers"] if row["format"] is None] == result["decoded"]
    assert len(result["layers"]) == 1 + 14
    text = cli("generate", tmp_path / "out", "Once", "-n", "4")
    assert text.exit_code == 0 and text.stdout == cli("generate", checkpoint, "Once", "-n", "4").stdout


def test_a_gguf_file(cli, cli_json, checkpoint, tmp_path):
    done = cli("export", checkpoint, "--to", "gguf", "--out", tmp_path / "m.gguf")
    assert done.exit_code == 0, done.stderr
    assert "15 Q8_0" in done.stdout and "llama-server -m" in done.stdout
    facts = cli_json("inspect", tmp_path / "m.gguf")
    assert facts["path_kind"] == "gguf" and len(facts["layers"]) == 14
    result = cli_json("export", checkpoint, "--to", "gguf", tmp_path / "again.gguf")
    kinds = {row["type"] for row in result["tensors"]}
    assert result["format"] == "gguf" and kinds == {"Q8_0", "F32"}
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_a_gguf_file_is_told_what_it_is_instead_of_not_quantized(cli, gguf, tmp_path):
    result = cli("export", gguf, "--to", "gguf", tmp_path / "again.gguf")
    assert result.exit_code == 2 and "is a GGUF file with Q4_0" in result.stderr
    assert "is not quantized" not in result.stderr and f"quantkit quantize {gguf}" in result.stderr


def test_one_place(cli, checkpoint, tmp_path):
    for arguments, words in ((("--out", tmp_path / "a", tmp_path / "b"), "two places"), ((), "no place")):
        result = cli("export", checkpoint, "--to", "gguf", *arguments)
        assert result.exit_code == 2 and words in result.stderr and "next: quantkit export" in result.stderr


def test_refusals(cli, checkpoint, tiny, tmp_path):
    for arguments, words in (((checkpoint, "--to", "awq"), "holds 4 bits"),
                             ((checkpoint, "--to", "gptqq"), "gptq"),
                             ((tiny, "--to", "gptq"), "is not quantized")):
        result = cli("export", *arguments, tmp_path / "out")
        assert result.exit_code != 0 and words in result.stderr and "next: " in result.stderr
    assert not list(tmp_path.iterdir())
