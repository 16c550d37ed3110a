"""A GGUF file runs by its own blocks: with the bits of the checkpoint that it was made of, from weights that
are packed once; and a file that changes meanwhile is noticed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from quantkit.export.gguf.export import export_gguf
from quantkit.ops.cpu_machine import reason_against_kernels
from quantkit.quantization.run import quantize
from quantkit.runtime import packed_file
from quantkit.runtime.loader import load
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError
from quantkit.testing import tiny_model

pytestmark = pytest.mark.skipif(reason_against_kernels() is not None, reason=str(reason_against_kernels()))
RECIPE = """rules:
  - {match: model.embed_tokens, method: rtn, format: gguf-q6_k}
  - {match: '*.v_proj', method: rtn, format: gguf-q6_k, optional: true}
  - {match: '*.k_proj', method: rtn, format: gguf-q8_0, optional: true}
  - {match: '*.o_proj', method: rtn, format: gguf-q4_0}
  - {match: '*.up_proj', method: rtn, format: gguf-q5_1, optional: true}
  - {match: '*.down_proj', method: rtn, format: gguf-iq4_nl}
  - {match: '*', method: rtn, format: gguf-q4_k}
"""
IDS = torch.randint(4, 300, (1, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=["llama", "qwen2", "phi3"])
def made(request, tmp_path_factory):
    """A checkpoint in blocks, and the same as a GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny_model(folder / "model", request.param, hidden_size=256, intermediate_size=512,
                        num_attention_heads=4, num_key_value_heads=2)
    (folder / "recipe.yaml").write_text(RECIPE)
    checkpoint = quantize(str(source), str(folder / "recipe.yaml"), folder / "checkpoint").out
    return checkpoint, export_gguf(str(checkpoint), folder / "m.gguf").out


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(made, tmp_path):
    """One that a test may change."""
    return shutil.copy(made[1], tmp_path / "m.gguf")


def test_bits_of_the_checkpoint(made):
    ours, theirs = load(str(made[0])), load(str(made[1]))
    assert torch.equal(ours.model(IDS), theirs.model(IDS))
    assert theirs.fallback_reason is None and " as " not in theirs.label and "Q4_K" in theirs.label
    assert theirs.bits_per_weight < 6 and theirs.weight_bytes < 1.1 * theirs.file_bytes


def test_decoded_it_leaves_activations_as_they_are(made):
    exact, decoded, blocks = (load(str(made[1]), dtype="float32"), load(str(made[1]), decoded=True),
                              load(str(made[1])))
    wanted = exact.model(IDS)
    gaps = [(model.model(IDS) - wanted).square().mean() for model in (decoded, blocks)]
    assert gaps[0] < gaps[1] and decoded.label == blocks.label and decoded.weight_bytes == blocks.weight_bytes


def test_packed_once(file, cache, monkeypatch):
    first = load(str(file)).model(IDS)
    kept = list((cache / "packed").iterdir())
    monkeypatch.setattr(GGUFSource, "quantized", lambda *_: pytest.fail("it was packed again"))
    again = load(str(file))
    assert torch.equal(again.model(IDS), first) and len(kept) == 1


def test_another_file_of_that_name(file, cache):
    load(str(file))
    (old,) = (cache / "packed").iterdir()
    data = bytearray(file.read_bytes())
    os.utime(file, ns=(1, 1))
    load(str(file))
    (new,) = (cache / "packed").iterdir()
    assert new != old, "the time is part of the key, and the old file's weights are gone"
    file.write_bytes(data + bytes(32))
    load(str(file))
    assert {new}.isdisjoint((cache / "packed").iterdir())


@pytest.mark.parametrize("change", ["cut", "replaced", "written", "gone"])
def test_changed_while_it_is_read(file, cache, monkeypatch, change):
    source, read = file.with_name("other.gguf"), GGUFSource.quantized
    shutil.copy(file, source)

    def changing(self, layer):
        weight = read(self, layer)
        if change == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif change == "replaced":
            shutil.copy(source, file)
        elif change == "written":
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        else:
            file.unlink(missing_ok=True)
        return weight

    monkeypatch.setattr(GGUFSource, "quantized", changing)
    with pytest.raises(SourceError, match=r"changed while it was read|can't be read"):
        load(str(file))
    assert not list((cache / "packed").iterdir()), "nothing is kept of it"


def test_nobody_may_write_there(made, cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="packed at each start.*QUANTKIT_CACHE"):
        model = load(str(made[1]))
    assert torch.equal(model.model(IDS), load(str(made[0])).model(IDS))


def test_a_full_disk(made, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_file.os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        model = load(str(made[1]))
    assert torch.equal(model.model(IDS), load(str(made[0])).model(IDS))
    assert not list((cache / "packed").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner there")
def test_what_others_may_write_to_is_made_anew(made, cache):
    wanted = load(str(made[1])).model(IDS)
    (kept,) = (cache / "packed").iterdir()
    data = bytearray(kept.read_bytes())
    data[-4096:] = bytes(4096)
    kept.write_bytes(data)
    kept.chmod(0o666)
    assert torch.equal(load(str(made[1])).model(IDS), wanted) and not kept.stat().st_mode & 0o022


def test_what_is_kept_is_damaged(made, cache):
    wanted = load(str(made[1])).model(IDS)
    (kept,) = (cache / "packed").iterdir()
    os.truncate(kept, kept.stat().st_size // 2)
    assert torch.equal(load(str(made[1])).model(IDS), wanted) and not kept.exists()
    assert torch.equal(load(str(made[1])).model(IDS), wanted) and kept.exists()


def test_a_scale_that_is_not_finite(file):
    with_nan = bytearray(file.read_bytes())
    source = GGUFSource(file, str(file))
    place = source._places["model.layers.0.self_attn.o_proj.weight"].tensor
    source.close()
    with_nan[place.offset:place.offset + 2] = b"\x00\x7e"
    file.write_bytes(with_nan)
    with pytest.raises(SourceError, match="scale that is not finite"):
        load(str(file))


@pytest.fixture(scope="module")
def read_by_blocks(qwen):
    """Tokens of a text, and which next ones a real model gives them by its file's own blocks: logits."""
    model = load(qwen)
    text = (Path(__file__).parents[2] / "docs" / "kv.md").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)[:257]
    with torch.inference_mode():
        return ids, model.model(torch.tensor([ids[:-1]]))[0].float()


def same_where_it_is_clear(logits, wanted, share):
    """Whether greedy tokens are the same where the first is 1 nat ahead, which it is at ``share`` of all."""
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1
    return clear.float().mean() > share and torch.equal(logits[clear].argmax(-1), wanted[clear].argmax(-1))


@pytest.mark.slow
def test_greedy_tokens_of_a_real_model(qwen, read_by_blocks):
    ids, logits = read_by_blocks
    with torch.inference_mode():
        wanted = load(qwen, decoded=True).model(torch.tensor([ids[:-1]]))[0].float()
    assert same_where_it_is_clear(logits, wanted, 0.4)


@pytest.mark.slow
@pytest.mark.oracle
def test_greedy_tokens_of_llama_cpp(qwen, read_by_blocks, llama_cpp):
    ids, logits = read_by_blocks
    with llama_cpp(open_source(qwen).path) as session:
        assert same_where_it_is_clear(logits, session.predict(ids, 0).logits.float(), 0.4)
