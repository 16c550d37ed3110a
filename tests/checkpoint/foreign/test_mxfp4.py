"""gpt-oss as OpenAI publishes it: the codes of the file, the weights and logits that transformers makes of
them, or an error that says what to do."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.engines import ENGINES, check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.export.gpt_oss import export_gpt_oss
from quantkit.export.layouts import export
from quantkit.formats.fp4 import MXFP4
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.testing import tiny_model

EXPERTS = "model.layers.{}.mlp.experts"
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
IDS = torch.randint(4, 300, (2, 40), generator=torch.Generator().manual_seed(5))
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def tiny_oss(tmp_path_factory):
    """float32, hidden size 64, experts of 96; untied, as the published ones are."""
    return tiny_model(tmp_path_factory.mktemp("models") / "oss", "gpt_oss", dtype="float32",
                      tie_word_embeddings=False, intermediate_size=96)


@pytest.fixture
def write(tiny_oss, tmp_path):
    """``write(kept=…, plain_layers=…)`` → the checkpoint, and the plain model that it stands for."""

    def call(kept=None, plain_layers=(), change=lambda tensors: None, **keys):
        random = torch.Generator().manual_seed(3)
        weights = load_file(tiny_oss / "model.safetensors")
        tensors = dict(weights)
        for layer in {0, 1} - set(plain_layers):
            for name in ("gate_up_proj", "down_proj"):
                full = f"{EXPERTS.format(layer)}.{name}"
                count, inputs, rows = tensors.pop(full).shape
                blocks = torch.randint(0, 256, (count, rows, inputs // 32, 16), generator=random,
                                       dtype=torch.uint8)
                scales = torch.randint(121, 125, (count, rows, inputs // 32), generator=random,
                                       dtype=torch.uint8)
                tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
                codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(3).long()
                exact = LEVELS[codes] * 2.0 ** (scales[..., None].float() - 127)
                weights[full] = exact.flatten(2).mT.contiguous()
        change(tensors)
        config = json.loads((tiny_oss / "config.json").read_text())
        words = {"quantization_config": {"modules_to_not_convert": KEPT if kept is None else kept,
                                         "quant_method": "mxfp4", **keys}}
        for folder, content, written in (("plain", weights, {}), ("theirs", tensors, words)):
            shutil.copytree(tiny_oss, tmp_path / folder)
            save_file(content, tmp_path / folder / "model.safetensors", {"format": "pt"})
            (tmp_path / folder / "config.json").write_text(json.dumps(config | written))
        return tmp_path / "theirs", tmp_path / "plain"

    return call


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load(str(folder), dtype="float32").model(IDS)


def test_logits_are_the_plain_models(write) -> None:
    theirs, plain = write()
    expected = logits(plain)
    assert expected.std() > 0.5
    assert (logits(theirs) - expected).abs().max() < 1e-4


def test_each_expert_has_its_codes(write) -> None:
    """Bytes as they are in the file, under the name of a single expert; everything else is plain."""
    theirs, plain = write()
    stored, weights = load_file(theirs / "model.safetensors"), load_file(plain / "model.safetensors")
    with open_checkpoint(theirs) as opened:
        assert opened.manifest is None
        rows = {row.name: row for row in opened.layers}
        assert {name for name, row in rows.items() if row.spec} == {
            name for name in rows if ".experts." in name} != set()
        row = rows[f"{EXPERTS.format(1)}.2.up_proj"]
        assert (row.method, row.format, row.bits) == ("mxfp4", "mxfp4-pack-quantized", 4.25)
        for layer in (0, 1):
            place = EXPERTS.format(layer)
            for expert in range(4):
                for name, fused, rows_of in (("gate_proj", "gate_up_proj", slice(0, None, 2)),
                                             ("up_proj", "gate_up_proj", slice(1, None, 2)),
                                             ("down_proj", "down_proj", slice(None))):
                    packed = opened.quantized(f"{place}.{expert}.{name}")
                    blocks = stored[f"{place}.{fused}_blocks"][expert, rows_of]
                    assert torch.equal(packed.tensors["weight_packed"], blocks.flatten(1))
                    assert torch.equal(packed.tensors["weight_scale"],
                                       stored[f"{place}.{fused}_scales"][expert, rows_of])
                    assert torch.equal(MXFP4.dequantize(packed),
                                       weights[f"{place}.{fused}"][expert].T[rows_of])
                    assert torch.equal(opened.tensor(f"{place}.{expert}.{name}.bias"),
                                       stored[f"{place}.{fused}_bias"][expert, rows_of])
    assert load(str(theirs)).label.startswith("mxfp4 fp4")


@pytest.mark.oracle
@pytest.mark.parametrize("kept", [None, [*KEPT, "model.layers.0.mlp.experts"]], ids=["all", "some"])
def test_transformers_makes_the_same_of_it(write, kept) -> None:
    """Weights bit for bit, and logits: transformers dequantizes what it can't multiply on this machine."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs, _ = write(kept=kept, plain_layers=() if kept is None else (0,))
    stored = load_file(theirs / "model.safetensors")
    with open_checkpoint(theirs) as opened:
        for fused, first, name in (("gate_up_proj", 0, "gate_proj"), ("gate_up_proj", 1, "up_proj")):
            full = f"{EXPERTS.format(1)}.{fused}"
            exact = convert_moe_packed_tensors(stored[f"{full}_blocks"], stored[f"{full}_scales"],
                                               dtype=torch.float32)
            packed = opened.quantized(f"{EXPERTS.format(1)}.3.{name}")
            assert torch.equal(MXFP4.dequantize(packed), exact[3].T[first::2])
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        theirs, quantization_config=transformers.Mxfp4Config(modules_to_not_convert=kept or KEPT,
                                                             dequantize=True),
        dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        assert (logits(theirs) - hf(IDS).logits).abs().max() < 1e-4


def test_layers_that_are_named_are_plain(write) -> None:
    theirs, plain = write(kept=[*KEPT, "model.layers.1.mlp"], plain_layers=(1,))
    assert (logits(theirs) - logits(plain)).abs().max() < 1e-4
    with open_checkpoint(theirs) as opened:
        assert {row.name.split(".")[2] for row in opened.layers if row.spec} == {"0"}


def test_it_is_verified_exported_and_not_quantized_again(write, tmp_path) -> None:
    theirs, _ = write()
    out = export(str(theirs), "mxfp4-pack-quantized", tmp_path / "out").out
    assert verify(str(out)).ok
    assert torch.equal(logits(out), logits(theirs))
    with open_checkpoint(theirs) as opened:
        for engine in ENGINES:
            failed = [check.detail for check in check_engine(engine, opened) if check.status == "failed"]
            assert len(failed) == (engine == "mlx") and all("truncate: false" in fault for fault in failed)
        assert [check for check in check_engine("sglang", opened, "cpu") if check.status == "failed"]
    with open_checkpoint(out) as opened:  # a tensor an expert, which nobody else reads
        for engine in ENGINES:
            assert any(check.status == "failed" for check in check_engine(engine, opened))
    with pytest.raises(QuantkitError, match="already quantized"):
        quantize(str(theirs), "int8", tmp_path / "again")


def test_it_comes_back_from_our_layout_bit_for_bit(write, tmp_path) -> None:
    theirs, _ = write(kept=[*KEPT, "model.layers.1.mlp.experts"], plain_layers=(1,))
    ours = export(str(theirs), "mxfp4-pack-quantized", tmp_path / "ours").out
    again = export_gpt_oss(str(ours), tmp_path / "again").out
    stored = load_file(theirs / "model.safetensors")
    tensors = dict(item for file in again.glob("*.safetensors") for item in load_file(file).items())
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    words = [json.loads((folder / "config.json").read_text()) for folder in (theirs, again)]
    assert words[0] == words[1]


def moved(name, change):
    full = f"{EXPERTS.format(0)}.{name}"

    def call(tensors):
        tensors[full] = change(tensors[full])
    return call


@pytest.mark.parametrize(("change", "match"), [
    (lambda tensors: tensors.pop(f"{EXPERTS.format(0)}.down_proj_scales"), "has no scales"),
    (lambda tensors: tensors.pop(f"{EXPERTS.format(0)}.gate_up_proj_blocks"), "has no blocks"),
    (moved("gate_up_proj_blocks", lambda t: t[:, :-1].contiguous()), "gate_up_proj_blocks has shape"),
    (moved("gate_up_proj_blocks", lambda t: t[:, :-2].contiguous()), "blocks of .* is torch.uint8"),
    (moved("gate_up_proj_blocks", lambda t: t[:3].contiguous()), "has shape"),
    (moved("gate_up_proj_blocks", lambda t: t.flatten(2)), "has shape"),
    (moved("down_proj_blocks", lambda t: t.view(torch.int8)), "is torch.int8"),
    (moved("down_proj_scales", lambda t: t[..., :-1].contiguous()), "scales of"),
    (moved("down_proj_scales", lambda t: torch.full_like(t, 255)), "not finite"),
    (lambda tensors: tensors.update({f"{EXPERTS.format(0)}.1.down_proj.bias": torch.zeros(64)}), "twice"),
    (lambda tensors: tensors.update({f"{EXPERTS.format(0)}.down_proj": torch.zeros(4, 96, 64)}),
     "stored twice"),
    (lambda tensors: tensors.update({f"{EXPERTS.format(0)}.down_proj_extra": torch.zeros(4)}),
     "nothing uses"),
])
def test_what_does_not_fit_is_an_error(write, change, match) -> None:
    theirs, _ = write(change=change)
    with pytest.raises(QuantkitError, match=match) as caught:
        load(str(theirs))
    assert caught.value.next


@pytest.mark.parametrize(("keys", "match"), [
    ({"kept": [*KEPT, "model.layers.*.mlp.experts"]}, "says that it isn't"),
    ({"kept": "lm_head"}, "list of names"), ({"kept": ["re:.*"]}, "list of names"),
    ({"kept": ["(a+)+$"]}, "list of names"), ({"kept": [["lm_head"]]}, "list of names"),
    ({"bits": 4, "block_size": 16}, "block_size|bits"), ({"plain_layers": (1,)}, "has no blocks")])
def test_what_the_config_claims_is_checked(write, keys, match) -> None:
    theirs, _ = write(**keys)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(theirs)
    assert caught.value.next


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_and_number_of_experts_is_read_or_refused(tiny_oss, tmp_path, data) -> None:
    """Few bytes that claim much: shapes with zeros, and numbers of experts of any kind."""
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_oss, folder, dirs_exist_ok=True)
    size = st.sampled_from([0, 1, 2, 3, 4, 64, 1 << 20])
    shapes = {name: data.draw(st.lists(size, max_size=4)) for name in (
        "gate_up_proj", "gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_bias")}
    tensors = {}
    for name, shape in shapes.items():
        if torch.Size(shape).numel() <= 1 << 16:
            tensors[f"{EXPERTS.format(0)}.{name}"] = torch.zeros(shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny_oss / "config.json").read_text())
    config["num_local_experts"] = data.draw(st.sampled_from([0, 1, 3, 4, 4096, 1 << 20, -1, None, "4", True]))
    if data.draw(st.booleans()):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError):
        load(str(folder))
