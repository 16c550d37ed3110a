"""MLX checkpoints written by NumPy: the same logits as the model they stand for, or an error that says what
to do."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.open import open_checkpoint
from quantkit.checkpoint.quantization_config import stored_quantization
from quantkit.export.layouts import export
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, QuantkitError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
WORDS = {"group_size": 32, "bits": 4, "mode": "affine"}
EIGHT = {"group_size": 64, "bits": 8, "mode": "affine"}


@pytest.fixture
def write(tiny, tmp_path, numpy_layouts):
    """``write(words, change=…, keep=…)`` → the checkpoint, and the plain model that it stands for."""

    def quantized(weight: np.ndarray, bits: int, size: int, symmetric: bool):
        groups = weight.reshape(len(weight), -1, size)
        low, high = groups.min(axis=2), groups.max(axis=2)
        if symmetric:
            scale = np.abs(groups).max(axis=2) / (2 ** (bits - 1) - 0.5)
            low = -(2.0 ** (bits - 1)) * scale.astype(np.float32)
        else:  # MLX counts from the end that is farther from zero
            down = np.abs(high) > np.abs(low)
            scale = np.where(down, low - high, high - low) / (2**bits - 1)
            low = np.where(down, high, low)
        levels = np.clip(np.round((groups - low[..., None]) / scale[..., None]), 0, 2**bits - 1).astype(int)
        parts = numpy_layouts.mlx(levels.reshape(weight.shape), scale, low, bits, np.float32)
        again = levels * parts["scales"][..., None] + parts["biases"][..., None]
        return parts, torch.from_numpy(again.astype(np.float32).reshape(weight.shape))

    def call(words=None, *, named=None, keep=("lm_head", "model.embed_tokens"), symmetric=False,
             change=lambda tensors: None, keys=("quantization", "quantization_config")):
        words, named, stored = words or WORDS, named or {}, {}
        weights = load_file(tiny / "model.safetensors")
        for name in [n for n in weights if n.endswith("proj.weight") or "embed" in n or "head" in n]:
            layer = name.removesuffix(".weight")
            scheme = named.get(layer, words)
            if layer in keep or scheme is False:
                continue
            parts, weights[name] = quantized(weights[name].numpy(), scheme["bits"], scheme["group_size"],
                                             symmetric)
            stored |= {f"{layer}.{suffix}": torch.from_numpy(array) for suffix, array in parts.items()}
        tensors = weights | stored
        change(tensors)
        config = json.loads((tiny / "config.json").read_text())
        for folder, content, written in (("plain", weights, {}), ("theirs", tensors, dict.fromkeys(
                keys, words | named))):
            shutil.copytree(tiny, tmp_path / folder)
            save_file({name: tensor.contiguous() for name, tensor in content.items()},
                      tmp_path / folder / "model.safetensors", {"format": "mlx" if written else "pt"})
            (tmp_path / folder / "config.json").write_text(json.dumps(config | written))
        return tmp_path / "theirs", tmp_path / "plain"

    return call


def same_logits(theirs, plain) -> None:
    ours, expected = (load(str(folder), dtype="float32") for folder in (theirs, plain))
    assert expected.model(IDS).std() > 0.5
    assert (ours.model(IDS) - expected.model(IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("words", [
    WORDS, {"group_size": 64, "bits": 2}, {"group_size": 32, "bits": 3}, {"group_size": 64, "bits": 5},
    {"group_size": 32, "bits": 6}, EIGHT], ids=str)
@pytest.mark.parametrize("keep", [(), ("lm_head", "model.embed_tokens")], ids=str)
@pytest.mark.sampled(2)
def test_every_width_and_the_embedding(write, words, keep) -> None:
    theirs, plain = write(words, keep=keep)
    same_logits(theirs, plain)
    with open_checkpoint(theirs) as opened:
        row = next(row for row in opened.layers if row.name == Q)
        assert (row.method, row.format) == ("mlx", "mlx")
        assert row.spec.minimum and row.spec.bits == words["bits"]
        assert opened.manifest is None
    assert load(str(theirs)).label.startswith(f"mlx int{words['bits']}")


def test_a_mix_by_name_and_a_layer_that_is_named_plain(write) -> None:
    same_logits(*write(named={DOWN: EIGHT, Q: False}))


def test_what_is_not_named_has_the_scheme_of_its_shapes(write) -> None:
    """mlx-lm infers it likewise."""
    theirs, plain = write(named={DOWN: EIGHT})
    config = json.loads((theirs / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        del config[key][DOWN]
    (theirs / "config.json").write_text(json.dumps(config))
    same_logits(theirs, plain)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_either_key_is_enough(write, key) -> None:
    theirs, plain = write(keys=(key,))
    same_logits(theirs, plain)
    with pytest.raises(QuantkitError, match="already quantized"):
        quantize(str(theirs), "int8", theirs.parent / "out")


def test_mlx_lms_key_counts_before_the_other_one(write) -> None:
    theirs, plain = write()
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (theirs / "config.json").write_text(json.dumps(config))
    assert stored_quantization(config)["quant_method"] == "mlx"
    same_logits(theirs, plain)


def test_symmetric_ones_go_to_other_layouts(write, tmp_path) -> None:
    theirs, plain = write(symmetric=True)
    out = export(str(theirs), "pack-quantized", tmp_path / "out").out
    assert verify(out).ok and "quantization" not in json.loads((out / "config.json").read_text())
    same_logits(out, plain)
    back = export(str(out), "mlx", tmp_path / "back").out
    assert verify(back).ok
    config, stored = json.loads((back / "config.json").read_text()), load_file(back / "model.safetensors")
    assert config["quantization"] == config["quantization_config"] == WORDS
    assert all(torch.equal(stored[name], tensor) for name, tensor in
               load_file(theirs / "model.safetensors").items())


def test_minima_go_to_no_other_layout(write, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="has minima, for which format pack-quantized has no place"):
        export(str(write()[0]), "pack-quantized", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def refused(folder) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        load(str(folder))
    assert caught.value.next
    return caught.value


@pytest.mark.parametrize(("change", "words"), [
    ({"mode": "mxfp4"}, "'mode'"), ({"mode": "nvfp4", "group_size": 16}, "'mode'"), ({"bits": 7}, "'bits'"),
    ({"bits": 1}, "'bits'"), ({"bits": True}, "'bits'"), ({"group_size": 16}, "'group_size'"),
    ({"group_size": None}, "'group_size'"), ({"quantize_input": "always"}, "quantize_input"),
    ({Q: {"bits": 4}}, "'group_size' is missing"), ({Q: WORDS | {"global_scale": True}}, "global_scale"),
    ({Q: EIGHT}, "q_proj.weight"), ({Q: False}, "says that it isn't"), ({"lm_head": WORDS}, "has no scales"),
    ({"lm_head": True}, "has no scales")], ids=str)
def test_what_words_are_refused(write, change, words) -> None:
    theirs, _ = write()
    config = json.loads((theirs / "config.json").read_text())
    config["quantization"] |= change
    (theirs / "config.json").write_text(json.dumps(config))
    assert words in str(refused(theirs))


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop(f"{Q}.biases"), "has no biases"),
    (lambda t: t.pop(f"{Q}.scales"), "no plain weight"),
    (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].to(torch.uint8)}), "q_proj.scales is torch.uint8"),
    (lambda t: t.update({f"{Q}.biases": t[f"{Q}.biases"].half()}), "q_proj.biases"),
    (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.int32)}), "torch.uint32 [64, 8] there"),
    (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :3]}), "no scheme"),
    (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :0]}), "no scheme"),
    (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].reshape(-1)}), "no scheme"),
    (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:4]}), "q_proj.weight"),
    (lambda t: t[f"{Q}.scales"].fill_(torch.inf), "not finite"),
    (lambda t: t[f"{Q}.biases"].fill_(torch.nan), "not finite"),
    (lambda t: t.update({f"{Q}.global_scale": torch.ones(1)}), "nothing uses")])
def test_damaged_tensors_are_refused(write, change, words) -> None:
    assert words in str(refused(write(change=change)[0]))


def test_ours_without_its_manifest_reads_all_the_same(tmp_path, tiny) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("""rules:
  - {match: lm_head}
  - {match: '*.down_proj', method: rtn, format: mlx,
     spec: {bits: 8, granularity: {strategy: group, size: 64}}}
  - {match: '*', method: rtn, format: mlx,
     spec: {bits: 4, symmetric: false, minimum: true, granularity: {strategy: group, size: 32}}}
""")
    out = quantize(str(tiny), str(recipe), tmp_path / "out").out
    assert verify(out).ok
    words = json.loads((out / "config.json").read_text())["quantization"]
    assert words == WORDS | {f"model.layers.{i}.mlp.down_proj": EIGHT for i in range(2)}
    expected = load(str(out), dtype="float32").model(IDS)
    (out / "quantkit.json").unlink()
    # with float32 scales a symmetric weight is rounded once more where it counts as one with minima
    assert (load(str(out), dtype="float32").model(IDS) - expected).abs().max() < 1e-4
