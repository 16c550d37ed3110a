"""Every model of images and text whose text model is known here: run as transformers runs it on text alone,
and quantized whole into what transformers reads."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.models.outline import TOWER
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.sources.causal_lm import WRAPPERS
from quantkit.support.errors import QuantkitError
from quantkit.testing.tiny import tiny_tokenizer

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="it is what these are compared with (extra: oracle)")

TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "layer_types": None, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
          "deepstack_visual_indexes": [0]}


def small(config, sizes) -> dict:
    written = config.to_dict()
    return {key: value for key, value in sizes.items() if key in written}


@pytest.fixture(params=WRAPPERS)
def model(request, tmp_path):
    """A random one in float32, and its folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = request.param
    default = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, text_config=default.text_config.to_dict() | small(
        default.text_config, TEXT), vision_config=default.vision_config.to_dict() | small(
            default.vision_config, VISION), **small(default, {"image_token_id": 500, "image_token_index": 500,
                                                              "video_token_id": 501, "pad_token_id": 0}))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return model, folder


def test_text_is_run_as_transformers_runs_it(model):
    whole, folder = model
    ids = torch.arange(10, 58).reshape(2, 24)
    with torch.inference_mode():
        expected = whole(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(load(str(folder), dtype="float32").model(ids), expected,
                                   rtol=1e-4, atol=1e-4)


def test_a_checkpoint_is_read_by_transformers_as_by_us(model, tmp_path):
    """The same text, by the same weights; and the tower and the projector are the original's."""
    from transformers import AutoModelForImageTextToText

    whole, folder = model
    rule = {"match": "model.layers.*", "method": "rtn", "spec": {
        "bits": 4, "granularity": {"strategy": "group", "size": 16}}}
    head = {"match": "lm_head", "optional": True, "method": "rtn", "spec": {
        "bits": 8, "granularity": {"strategy": "channel"}}}  # which engines expect plain there
    recipe = Recipe.model_validate({"name": "four", "for": "transformers", "rules": [rule, head]})
    if whole.config.model_type == "qwen3_vl_moe":
        with pytest.raises(QuantkitError) as caught:
            quantize(str(folder), recipe, tmp_path / "out")
        assert "experts only together" in str(caught.value.why)
        return
    out = quantize(str(folder), recipe, tmp_path / "out").out
    loaded = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(10, 58).reshape(2, 24)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(input_ids=ids, use_cache=False).logits,
                                   load(str(out), dtype="float32").model(ids), rtol=1e-3, atol=1e-3)
    stored = dict(loaded.named_parameters())
    tower = [name for name, _ in whole.named_parameters() if re.search(TOWER, name)]
    assert tower and all(torch.equal(stored[name], parameter) for name, parameter in
                         whole.named_parameters() if name in tower)
