"""The loading rules of mlx-lm: what its models' classes read of ``config.json``, and what they leave out.

mlx-lm (https://github.com/ml-explore/mlx-lm) has a file a family. It takes the keys that it knows and its own
defaults for what is missing, and says nothing of other keys: so some models load there as other models. The
rules are those of mlx-lm 0.32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from quantkit.checkpoint.engine_rules import CheckpointFacts
from quantkit.checkpoint.integrity import VerifyCheck
from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.mlx import GROUPS

_COMMON = frozenset({"hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                     "rms_norm_eps", "vocab_size"})
_GROUPED = _COMMON | {"num_key_value_heads"}
FAMILIES: dict[str, frozenset[str]] = {
    "llama": _COMMON, "mistral": _GROUPED, "phi3": _COMMON, "qwen2": _GROUPED, "mimo": _GROUPED,
    "mixtral": _GROUPED, "gemma2": _GROUPED | {"head_dim"},
    "gemma3_text": _GROUPED | {"head_dim", "sliding_window"},
    "gpt_oss": _GROUPED | {"head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok"},
    "qwen3": _GROUPED | {"head_dim", "max_position_embeddings", "tie_word_embeddings"},
    "qwen3_moe": _GROUPED | {"head_dim", "max_position_embeddings", "tie_word_embeddings", "rope_theta",
                             "num_experts", "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers",
                             "moe_intermediate_size", "norm_topk_prob"}}
"""Families that it has in common with us, and the keys that it needs or has other defaults for."""
TIED = {"llama": True, "mistral": True, "qwen2": True, "mimo": False, "phi3": False, "mixtral": False}
"""Whether the head is the embedding where ``tie_word_embeddings`` is missing. Gemma's classes don't ask: that
of ``gemma3_text`` looks for a head in the file, that of ``gemma2`` has none."""
THETAS = {"qwen2": 1e6, "mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0}
"""Bases of the rotation where ``rope_theta`` is missing, other than 10,000."""
UNSCALED = ("mixtral", "gemma2")
"""Families whose classes know no ``rope_scaling``."""
DIVIDED = ("mixtral", "phi3", "qwen2", "mimo")
"""Families whose heads are ``hidden_size / num_attention_heads`` wide, whatever ``head_dim`` says."""
OSS_LIMIT = 7.0
"""Of gpt-oss's activation."""
UNBIASED = ("qwen3", "qwen3_moe", "gemma2", "gemma3_text")
"""Families whose attention may have biases here and never has any there."""


def _checked(name: str, faults: list[str], fine: str) -> Iterator[VerifyCheck]:
    yield VerifyCheck(name, "failed" if faults else "ok", "; ".join(faults) or fine)


def family(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """It has the family, and finds what it needs in ``config.json``."""
    kind = subject.model.model_type
    if kind not in FAMILIES:
        yield VerifyCheck("family", "note", f"no rule here knows {kind}: look for it in mlx_lm/models")
        return
    missing = sorted(key for key in FAMILIES[kind] if subject.config.get(key) is None)
    faults = [f"config.json lacks {', '.join(missing)}: mlx-lm has no default for it, or another one"]
    yield from _checked("family", faults if missing else [], kind)


def tied_head(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """A key that is missing means another head than transformers' in some families: the file's would be
    dropped, or one expected that isn't there."""
    default = TIED.get(subject.model.model_type)
    if subject.model.model_type == "gpt_oss" and subject.tied:
        yield VerifyCheck("head", "failed", "its class of gpt_oss has a head beside the embedding")
    if subject.model.model_type == "gemma2" and not subject.tied:
        yield VerifyCheck("head", "failed", "its class of gemma2 has no head beside the embedding")
    if default is None:
        return
    read = subject.config.get("tie_word_embeddings")
    faults = [] if (default if read is None else read) == subject.tied else [
        f"config.json lacks tie_word_embeddings: {str(subject.tied).lower()}, and mlx-lm takes "
        f"{str(default).lower()} for it"]
    yield from _checked("head", faults, "the embedding" if subject.tied else "of its own")


def rope(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Most of its classes read ``rope_theta`` and ``rope_scaling``, and no ``rope_parameters``."""
    model, config = subject.model, subject.config
    kind, inner = model.model_type, config.get("rope_parameters") if model.model_type == "qwen3" else None
    inner = inner if isinstance(inner, dict) else {}
    theta = config.get("rope_theta") or inner.get("rope_theta") or THETAS.get(kind, 1e4)
    table = config.get("rope_scaling") or inner
    faults = []
    if float(theta) != model.rope.theta:
        faults.append(f"it would rotate by the base {theta:g}, not {model.rope.theta:g}: write rope_theta "
                      "into config.json itself")
    local = config.get("rope_local_base_freq") or 1e4
    if kind == "gemma3_text" and model.local_rope is not None and float(local) != model.local_rope.theta:
        faults.append(f"layers with a window would rotate by the base {local:g}, not "
                      f"{model.local_rope.theta:g}: write rope_local_base_freq into config.json itself")
    if model.rope.kind != "default":
        faults += _scaling_faults(kind, model.rope.kind, table)
    if model.rope.kind == "yarn" and not model.rope.truncate:
        faults.append("its yarn ramp begins and ends at whole dimensions, and this model's (truncate: false) "
                      "doesn't: logits are others")
    yield from _checked("rope", faults, f"base {model.rope.theta:g}, {model.rope.kind}")


def _scaling_faults(family_name: str, kind: str, table: Any) -> Iterator[str]:
    if family_name in UNSCALED:
        yield f"its class of {family_name} ignores rope_scaling, and this model has {kind}"
    elif not table:
        yield "it reads rope_scaling, which config.json has under another name: positions would not be scaled"
    elif family_name == "phi3" and (kind not in ("longrope", "linear")
                                    or not {"type", "long_factor"} <= set(table)):
        yield "of phi3 it needs 'type' and 'long_factor' in rope_scaling, and knows longrope and linear"


def attention(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Widths of heads, biases and caps that its classes don't have."""
    model = subject.model
    faults = []
    if model.model_type in DIVIDED and model.head_dim * model.num_heads != model.hidden_size:
        faults.append(f"heads are {model.head_dim} wide, and it takes hidden_size / num_attention_heads")
    if model.model_type in UNBIASED and (model.qkv_bias or model.o_bias):
        faults.append(f"its class of {model.model_type} has no biases in attention")
    if model.model_type == "gemma3_text" and model.logit_softcap is not None:
        faults.append("it ignores final_logit_softcapping")
    if model.model_type == "gemma2" and None in (model.logit_softcap, model.attention_softcap):
        faults.append("its class of gemma2 always caps scores and logits")
    if model.model_type == "gpt_oss" and not model.qkv_bias:
        faults.append("its class of gpt_oss has biases in attention")
    if model.model_type == "gpt_oss" and model.activation_limit != OSS_LIMIT:
        faults.append(f"it clamps activations at {OSS_LIMIT:g}, and this model at {model.activation_limit:g}")
    yield from _checked("attention", faults, "as its class has it")


def windows(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """Gemma 3 has them by a period, gpt-oss where the model does; all other classes have none here."""
    model = subject.model
    sizes = {size for size in model.sliding_windows if size is not None}
    if model.model_type == "gpt_oss":
        kinds = {size is None for size in model.sliding_windows}
        faults = [] if len(kinds) == 2 else ["it needs a layer with a window and one without"]
        yield from _checked("windows", faults, "the model's")
        return
    if model.model_type == "gemma3_text":
        period = subject.config.get("sliding_window_pattern") or 6
        wanted = [index % period != period - 1 for index in range(model.num_layers)]
        faults = [] if wanted == [size is not None for size in model.sliding_windows] else [
            f"it gives each layer a window but every {period}th; write the model's sliding_window_pattern "
            "into config.json"]
        yield from _checked("windows", faults, f"each layer but every {period}th")
    elif sizes and model.model_type in FAMILIES:
        yield VerifyCheck("windows", "note", "it ignores sliding_window: texts of more than "
                                             f"{min(sizes)} tokens give other tokens there")


def experts(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """All experts of a layer become one tensor a projection, which some classes know of plain ones only."""
    groups: dict[str, list[LayerRow]] = defaultdict(list)
    for place, rows in subject.expert_groups().items():
        for row in rows:
            groups[f"{place}.experts.*.{row.name.rpartition('.')[2]}"].append(row)
    if not groups:
        return
    faults = [f"{name}: its class of qwen3_moe puts only plain experts together, without scales"
              for name, rows in groups.items()
              if subject.model.model_type == "qwen3_moe" and any(row.spec for row in rows)]
    faults += [f"{name}: experts of a projection share a scheme" for name, rows in groups.items()
               if len({(row.spec, row.format) for row in rows}) > 1]
    more = [f"and {len(faults) - 1} more"] if len(faults) > 1 else []
    yield from _checked("experts", [*faults[:1], *more], "of one scheme a projection")


def awq_groups(subject: CheckpointFacts) -> Iterator[VerifyCheck]:
    """AWQ's tensors are rearranged at loading: groups stay as they are."""
    faults = [f"{layer.name}: {layer.label}, and its groups are {', '.join(map(str, GROUPS))}"
              for layer in subject.packed if layer.size not in GROUPS]
    yield from _checked("groups", faults[:1], "of a size that it has")
    yield VerifyCheck("scales", "note",
                      "it rounds each scale times its zero point, and all other tensors, to float16")


RULES = (family, tied_head, rope, attention, windows, experts)
"""What is asked of every checkpoint."""
