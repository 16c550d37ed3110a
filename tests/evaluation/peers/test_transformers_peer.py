"""transformers as a row: the same numbers as ours from the same weights, and what its quantizers change."""

import json

import pytest

from quantkit.evaluation.peers.run import PeerSpeedSettings
from quantkit.evaluation.quality.score import compare
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

from .conftest import run_peer

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")


def test_the_same_weights_give_the_same_numbers(folder, reference, windows):
    row = run_peer(f"transformers({folder})", {"one": windows, "two": windows[:1]}, 0, reference,
                   PeerSpeedSettings(prefill=8, decode=3, repeats=2, threads=1))
    (ours,) = compare([reference], windows)
    assert row.method == "fp32" and row.tool.startswith("transformers 5")
    assert row.bits_per_weight == 32 and row.file_bytes == (folder / "model.safetensors").stat().st_size
    assert row.texts["one"]["kl_mean"].value < 1e-6 and row.texts["one"]["top1"].value == 1
    assert row.texts["one"]["perplexity"].value == pytest.approx(ours["perplexity"].value, rel=1e-4)
    assert [len(row.window_means[name]["kl_mean"]) for name in ("one", "two")] == [3, 1]
    assert row.metrics["decode_tok_s"].value > 0 and row.peak_bytes > row.speed.memory.weights
    assert [point.context for point in row.speed.decode] == [8] and set(row.measured) == {"speed", "quality"}
    assert json.loads(json.dumps(row.to_dict()))["kl_mean"] == row.metrics["kl_mean"].value


@pytest.mark.slow
def test_a_prompt_is_not_scored(folder, reference, windows):
    row = run_peer(f"transformers({folder})", {"one": windows}, 10, reference)
    (ours,) = compare([reference], windows, prompt=0)
    assert row.metrics["kl_mean"].value < 1e-6
    assert row.metrics["perplexity"].value != pytest.approx(ours["perplexity"].value, rel=1e-4)
    assert row.speed is None and row.peak_bytes is None and set(row.measured) == {"quality"}


def test_bitsandbytes_quantizes_while_it_loads(folder, reference, windows):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra: oracle)")
    row = run_peer(f"transformers({folder}, quantization=bitsandbytes-nf4)", {"one": windows}, 0, reference)
    assert row.method == "bitsandbytes nf4" and "bitsandbytes 0." in row.tool
    assert row.bits_per_weight == 4.5 and row.file_bytes is None
    assert 0.001 < row.metrics["kl_mean"].value < 1


@pytest.mark.parametrize(("symmetric", "options", "method"), [
    pytest.param("true", "", "compressed-tensors", marks=pytest.mark.slow),
    ("false", ", quantization=dequantize", "compressed-tensors, dequantized")])
def test_a_checkpoint_of_ours_differs_there_as_it_does_here(folder, reference, windows, tmp_path, symmetric,
                                                            options, method):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    (tmp_path / "recipe.yaml").write_text(
        'name: int4\ndescription: for tests\nrules:\n  - match: "*"\n    method: rtn\n'
        f"    spec: {{bits: 4, symmetric: {symmetric}, granularity: {{strategy: group, size: 32}}}}\n",
        encoding="utf-8")
    quantize(str(folder), str(tmp_path / "recipe.yaml"), tmp_path / "int4")
    _, ours = compare([reference, load(str(tmp_path / "int4"))], windows)
    row = run_peer(f"transformers({tmp_path / 'int4'}{options})", {"one": windows}, 0, reference)
    assert row.method == method and "compressed-tensors 0." in row.tool
    assert row.metrics["kl_mean"].value == pytest.approx(ours["kl_mean"].value, rel=0.02)


def test_another_tokenizer_is_refused(reference, windows, tmp_path):
    other = tiny_model(tmp_path / "other", "qwen2", dtype="float32")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads(text)
    data["model"]["merges"] = data["model"]["merges"][:5]
    (other / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError, match="into other tokens"):
        run_peer(f"transformers({other})", {"one": windows}, 0, reference)


@pytest.mark.slow
def test_ids_beyond_the_vocabulary_are_refused(folder, reference, windows, tmp_path):
    larger = load(str(tiny_model(tmp_path / "larger", vocab_size=320)))
    wrong = windows.clone()
    wrong[1, 3] = reference.config.vocab_size
    with pytest.raises(UsageError, match=f"vocabulary of {reference.config.vocab_size} tokens"):
        run_peer(f"transformers({folder})", {"one": wrong}, 0, larger)


def test_a_folder_that_is_not_there(reference, windows, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(QuantkitError, match="transformers failed") as caught:
        run_peer(f"transformers({tmp_path / 'nothing'})", {"one": windows}, 0, reference)
    assert "python=VENV/bin/python" in caught.value.next
