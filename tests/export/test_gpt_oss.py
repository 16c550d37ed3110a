"""A checkpoint of gpt-oss in OpenAI's layout: the same model here and in transformers, or nothing at all."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from quantkit.checkpoint import durable
from quantkit.checkpoint.engines import ENGINES, check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.cli.main import main
from quantkit.export.gpt_oss import export_gpt_oss
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import CheckpointError, SpecError, UsageError
from quantkit.testing import tiny_model

FP4 = "spec: {kind: fp, bits: 4, granularity: {strategy: group, size: 32}, scale_dtype: e8m0}"
RECIPE = f"""calibration: {{windows: 4, window: 64, importance: equal}}
rules:
  - {{match: "*.experts.*", method: gptq, {FP4}}}
  - {{match: "*"}}
"""
IDS = torch.randint(4, 300, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "plain", "gpt_oss", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    """Experts solved by GPTQ, everything else kept."""
    return quantized(plain, RECIPE, tmp_path_factory.mktemp("made"))


def quantized(model, recipe, place):
    (place / "recipe.yaml").write_text(recipe)
    return quantize(str(model), str(place / "recipe.yaml"), place / "out").out


def logits(folder):
    with torch.no_grad():
        return load(str(folder), dtype="float32").model(IDS)


def test_it_is_the_same_model(made, tmp_path) -> None:
    result = export_gpt_oss(str(made), tmp_path / "out")
    assert torch.equal(logits(result.out), logits(made))
    assert result.experts == 2 * 4 * 3
    assert sorted(path.name for path in result.out.glob("model*")) == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), "model.safetensors.index.json"]
    with open_checkpoint(result.out) as opened:
        for engine in ENGINES:
            failed = [check.detail for check in check_engine(engine, opened) if check.status == "failed"]
            assert len(failed) == (engine == "mlx") and all("truncate: false" in fault for fault in failed)


@pytest.mark.oracle
def test_transformers_computes_the_same(made, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
    out = export_gpt_oss(str(made), tmp_path / "out").out
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True)).eval()
    with torch.no_grad():
        assert (logits(out) - hf(IDS).logits).abs().max() < 1e-4


def test_the_command(made, tmp_path) -> None:
    ran = CliRunner().invoke(main, ["export", str(made), "--to", "gpt-oss", str(tmp_path / "out"), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["experts"] == 24
    ran = CliRunner().invoke(main, ["export", str(made), "--to", "gpt-oss", str(tmp_path / "second"), "-q"])
    assert "24 Linears in MXFP4" in ran.output and "--for vllm" in ran.output


@pytest.mark.parametrize(("rule", "match"), [
    (f"{{match: '*', method: rtn, {FP4}}}", "q_proj is quantized, and only experts can be"),
    ("{match: '*.experts.*', method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}",
     "by pack-quantized"),
    (f"{{match: '*.0.mlp.experts.2.*', method: rtn, {FP4}}}", "some are quantized, and some aren't")])
def test_what_the_layout_has_no_place_for(plain, tmp_path, rule: str, match: str) -> None:
    ours = quantized(plain, f"rules:\n  - {rule}\n  - {{match: '*', optional: true}}\n", tmp_path)
    with pytest.raises(SpecError) as caught:
        export_gpt_oss(str(ours), tmp_path / "theirs")
    assert match in caught.value.why and caught.value.next
    assert not list(tmp_path.glob("theirs*"))


def test_other_models_and_places_are_refused(plain, made, tmp_path) -> None:
    with pytest.raises(UsageError, match="not quantized"):
        export_gpt_oss(str(plain), tmp_path / "theirs")
    llama = tiny_model(tmp_path / "llama")
    other = quantized(llama, f"rules:\n  - {{match: '*', method: rtn, {FP4}}}\n", tmp_path)
    with pytest.raises(UsageError, match="llama model"):
        export_gpt_oss(str(other), tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="already exists"):
        export_gpt_oss(str(made), llama)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=str)
def test_nothing_is_left_of_an_export_that_stops(made, tmp_path, monkeypatch, error) -> None:
    def stop(what: str) -> None:
        if "00003-of" in what:
            raise error

    monkeypatch.setattr(durable, "step", stop)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        export_gpt_oss(str(made), tmp_path / "out")
    assert not list(tmp_path.iterdir())
