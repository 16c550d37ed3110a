"""Unknown keys: what says nothing about the maths is passed over, whatever may change it is an error."""

from __future__ import annotations

import json
import warnings

import pytest

from quantkit.models.architecture import parse_config
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing import FAMILIES

NOTHING = [
    ("_model_name_or_path", "meta-llama/Llama-3.1-8B"), ("_model_name_or_path", "gpt2"),
    ("base_model", "a/b"),
    ("_commit_hash", "0123456789abcdef"), ("_attn_implementation_internal", "flash_attention_4"),
    ("attn_implementation", "sdpa"), ("trainer_version", "4.57.0.dev0"), ("trained_with", "TRL 0.24, 8 GPUs"),
    ("license", "mit"), ("made_by", ""), ("surprise", None), ("use_mamba", False), ("num_extra_layers", 0),
    ("clip_qkv", 0.0), ("extra_modules", []), ("extra_modules", {}), ("expert_dropout", 0.2),
    ("z_loss_weight", 1e-4), ("ctc_loss_reduction", "sum"), ("layer_initializer_std", 0.02),
    ("image_token_id", 128256), ("image_token_index", 9), ("logits_scaling", 1),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0)]
CHANGES = [
    ("use_mamba", True), ("num_extra_layers", 2), ("clip_qkv", 8.0), ("extra_modules", ["a/b"]),
    ("extra_modules", {"a": None}), ("norm_type", "layernorm"), ("mlp_activation", "relu2"),
    ("position_embedding_type", "relative_key"), ("_rope_type", "yarn"), ("_window_pattern", 3),
    ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_name", "a/b"), ("mixer", "mamba2"),
    ("mlp_activation", "a squared relu"), ("is_causal", False), ("use_rope", False), ("use_rms_norm", False),
    ("apply_residual", False), ("use_sliding_window_here", False), ("scale_scores", False),
    ("attention_multiplier", 1.0), ("embedding_multiplier", 0.0), ("embedding_multiplier", 12.0),
    ("embedding_multiplier", True), ("num_mtp_layers", 1), ("no_rope_layers", []), ("capacity_factor", 1.0),
    ("experts_per_token", 2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), NOTHING)
def test_what_says_nothing_is_passed_over(make_config, family, key, value):
    assert parse_config(make_config(family, **{key: value})) == parse_config(make_config(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_what_may_change_the_maths_is_an_error(make_config, family, key, value):
    with pytest.raises(UnsupportedModelError, match=key):
        parse_config(make_config(family, **{key: value}))


@pytest.mark.oracle
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mimo"])
def test_every_key_that_transformers_writes(tmp_path, family):
    """A config of its own making, as ``save_pretrained`` leaves it, beside notes that it makes.
    MiMo's config is its checkpoint's own code: transformers has none."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers.AutoConfig.for_model(family, _model_name_or_path="owner/name", my_note="by me, x")
        made.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert parse_config(written).num_layers == written["num_hidden_layers"]
    assert parse_config(written | {"_model_name_or_path": "owner/name"}) == parse_config(written)
    with pytest.raises(UnsupportedModelError, match="surprise"):
        parse_config(written | {"surprise": 1})
