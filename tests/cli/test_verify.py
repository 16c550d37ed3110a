"""``quantkit verify``: whole, damaged, and no checkpoint at all."""

import json
import re
import shlex
import shutil

import pytest


def test_a_whole_checkpoint(cli, checkpoint):
    result = cli("verify", checkpoint)
    assert result.exit_code == 0, result.stderr
    assert "is whole" in result.stdout and "model.safetensors" in result.stdout


def test_one_flipped_byte_names_the_file(cli, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    result = cli("verify", copy)
    assert result.exit_code == 1
    assert "failed  model.safetensors" in result.stdout
    assert all(words in result.stderr for words in ("is damaged", "model.safetensors", "next: "))
    report = cli("verify", copy, "--json")
    assert report.exit_code == 1
    assert json.loads(report.stdout)["ok"] is False


def test_json(cli_json, checkpoint):
    report = cli_json("verify", checkpoint)
    assert report["ok"] is True and {c["status"] for c in report["checks"]} == {"ok"}


def test_not_a_checkpoint(cli, tiny, tmp_path):
    for folder in (tiny, tmp_path / "nope"):
        result = cli("verify", folder)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith("error: ") and "next: " in result.stderr


def test_for_an_engine(cli, cli_json, checkpoint, tmp_path):
    refused = cli("verify", checkpoint, "--for", "vllm")
    assert refused.exit_code == 1 and "model.embed_tokens" in refused.stderr
    (command,) = re.findall(r"next: quantkit (export .* OUT),", refused.stderr)
    checkpoint = tmp_path / "OUT"
    words = command.replace("FORMAT", "pack-quantized").replace("OUT", str(checkpoint))
    assert cli(*shlex.split(words)).exit_code == 0, "as the refusal says"
    loads = cli("verify", checkpoint, "--for", "vllm")
    assert loads.exit_code == 0 and "vllm on cuda loads" in loads.stdout
    assert "ok      kernel on cuda" in loads.stdout
    refused = cli("verify", checkpoint, "--for", "vllm", "--for-device", "cpu")
    assert refused.exit_code == 1 and "failed  kernel on cpu" in refused.stdout
    assert "vllm on cpu refuses" in refused.stderr and "next: quantkit export" in refused.stderr
    report = cli("verify", checkpoint, "--for", "vllm", "--for-device", "cpu", "--json")
    assert report.exit_code == 1 and json.loads(report.stdout)["loads"] is False
    assert cli_json("verify", checkpoint, "--for", "transformers", "--for-device", "cpu")["loads"] is True
    assert cli("verify", checkpoint, "--for", "ollama").exit_code == 2


@pytest.mark.parametrize("command", ["generate", "serve-local", "eval"])
def test_every_byte_is_checked_before_a_model_runs(cli, checkpoint, tmp_path, command):
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    more = {"generate": ["Once"], "serve-local": ["--port", "0"]}.get(command, [])
    result = cli(command, folder, *more, "--verify")
    assert result.exit_code == 1 and result.stdout == ""
    assert f"error: {weights}, tensor" in result.stderr and f"quantkit verify {folder}" in result.stderr


def test_a_checkpoint_that_is_verified_runs(cli, checkpoint, tiny):
    result = cli("generate", checkpoint, "Once", "-n", "2", "--verify")
    assert result.exit_code == 0 and f"verifying {checkpoint}" in result.stderr
    assert "verifying" not in cli("generate", checkpoint, "Once", "-n", "2").stderr
    result = cli("generate", tiny, "Once", "-n", "2", "--verify")
    assert result.exit_code == 2 and "can't be verified" in result.stderr
    result = cli("eval", tiny, checkpoint, "--windows", "2", "--window", "32", "--no-speed", "--verify")
    assert result.exit_code == 0, result.stderr
    assert f"{tiny} isn't verified" in result.stderr and f"verifying {checkpoint}" in result.stderr
