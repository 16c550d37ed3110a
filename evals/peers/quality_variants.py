"""What :mod:`quality` compares: recipes as they are shipped, rules of ours, and the other tools' settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GROUP, CHANNEL = "granularity: {group}", "granularity: {{strategy: channel}}"
TRELLIS = "spec: {{kind: trellis, bits: %d, window: 12, rotation: hadamard, " + CHANNEL + "}}"
CLIPPED = "method: rtn, options: {{clip_search: true}}, spec: {{bits: %d, symmetric: false, " + GROUP + "}}"
RULES = {  # ours: bits, calibrated, rule
    "rtn int8 channel": (8, False, "method: rtn, spec: {{bits: 8, " + CHANNEL + "}}"),
    "rtn int8": (8, False, "method: rtn, spec: {{bits: 8, " + GROUP + "}}"),
    "rtn int4": (4, False, "method: rtn, spec: {{bits: 4, " + GROUP + "}}"),
    "rtn int4 asym": (4, False, "method: rtn, spec: {{bits: 4, symmetric: false, " + GROUP + "}}"),
    "rtn int3 asym": (3, False, "method: rtn, spec: {{bits: 3, symmetric: false, " + GROUP + "}}"),
    "rtn int2 asym": (2, False, "method: rtn, spec: {{bits: 2, symmetric: false, " + GROUP + "}}"),
    "rtn int8 channel clip": (8, False, "method: rtn, options: {{clip_search: true}}, spec: {{bits: 8, "
                              + CHANNEL + "}}"),
    "rtn int4 clip": (4, False, "method: rtn, options: {{clip_search: true}}, spec: {{bits: 4, " + GROUP
                      + "}}"),
    "rtn int4 asym clip": (4, False, CLIPPED % 4),
    "rtn int3 asym clip": (3, False, CLIPPED % 3),
    "rtn int2 asym clip": (2, False, CLIPPED % 2),
    "nf4": (4, False, "method: nf4, spec: {{kind: nf, bits: 4, granularity: {{strategy: block, size: 64}}, "
                      "scale_dtype: float32}}"),
    "gptq int8 channel": (8, True, "method: gptq, spec: {{bits: 8, " + CHANNEL + "}}"),
    "gptq int8": (8, True, "method: gptq, spec: {{bits: 8, " + GROUP + "}}"),
    "gptq int5 asym": (5, True,
                       "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 5, symmetric: false, "
                       + GROUP + "}}"),
    "gptq int4": (4, True, "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 4, " + GROUP + "}}"),
    "gptq int4 asym": (4, True,
                       "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 4, symmetric: false, "
                       + GROUP + "}}"),
    "gptq int3": (3, True, "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 3, " + GROUP + "}}"),
    "gptq int3 asym": (3, True,
                       "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 3, symmetric: false, "
                       + GROUP + "}}"),
    "gptq int2 asym": (2, True,
                       "method: gptq, options: {{descent_passes: 3}}, spec: {{bits: 2, symmetric: false, "
                       + GROUP + "}}"),
    "awq int4": (4, True, "method: rtn, options: {{clip_search: true}}, spec: {{bits: 4, " + GROUP + "}}"),
    "autoround int4": (4, True, "method: autoround, spec: {{bits: 4, " + GROUP + "}}"),
    **{f"trellis{bits}": (bits, True, "method: gptq, " + TRELLIS % bits) for bits in (4, 3, 2)},
    **{f"rtn trellis{bits}": (bits, False, "method: rtn, " + TRELLIS % bits) for bits in (4, 3, 2)},
}
RECIPE = """transforms: {transforms}
rules:
  - {{match: lm_head, optional: true}}
  - {{match: "*", {rule}}}
"""
OWN_TEXT = ("gptq int8 channel", "gptq int4 asym")  # also calibrated on what the model itself writes
LIGHT = {"iters": 50, "lr": 5e-3}  # AutoRound's own setting for those who are in a hurry
ROTATIONS = {"opt_rotation_epochs": 2, "opt_finetune_epochs": 2, "opt_train_samples": 512}
"""ParoQuant with a tenth of its steps: with all of them a CPU needs hours."""
WIDTHS = (2, 3, 4, 5, 6)
BUDGETS = {  # ours: bits, budget, whether grids are symmetric; 8 bits a row beside WIDTHS
    "mixed 4.25": (4, "4.25bpw", True),
    "mixed asym 4.25": (4, "4.25bpw", False),
    "mixed asym 3.5": (3, "3.5bpw", False),
    "mixed asym 3": (3, "3bpw", False),
}
CANDIDATES = """rules:
  - {match: lm_head, optional: true}
candidates:
  - {method: gptq, spec: {bits: 8, granularity: {strategy: channel}}}
"""
SHIPPED = {  # recipe: bits, whether it is calibrated
    "int8": (8, False), "int8-datafree": (8, False), "int4-rtn": (4, False), "int4-datafree": (4, False),
    "nf4": (4, False), "int3-datafree": (3, False), "int2-datafree": (2, False), "int8-gptq": (8, True),
    "int5-asym": (5, True), "int4": (4, True), "int4-asym": (4, True), "int3": (3, True), "int2": (2, True),
    "trellis4": (4, True), "trellis3": (3, True), "trellis2": (2, True),
}


class CalibrationKind(StrEnum):
    """What a variant is calibrated on."""

    NONE = "none"
    DEFAULT = "default"
    """What the tool takes if no text is named."""
    NEAR = "near"
    """``--calibration``, which is near the first text."""
    SELF = "self"
    """What the model itself writes."""


@dataclass(frozen=True)
class PeerVariant:
    """One way to quantize, by one peer."""

    peer: str
    name: str
    bits: int
    calibration: CalibrationKind = CalibrationKind.NONE
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of its files."""
        return f"{self.peer}-{self.name}".strip("-").replace(" ", "-")


UNQUANTIZED = PeerVariant("", "unquantized", 16)


def variants(group: int) -> list[PeerVariant]:
    """All of them, quick ones first, then by their calibration."""
    everything = [*ours(), *others(group)]
    order = [CalibrationKind.NONE, CalibrationKind.DEFAULT, CalibrationKind.NEAR, CalibrationKind.SELF]
    return sorted(everything, key=lambda variant: order.index(variant.calibration))


def ours() -> list[PeerVariant]:
    """Rules, recipes as they are shipped, and budgets."""
    none, default, near, itself = CalibrationKind
    rules = [PeerVariant("ours", name, bits, near if calibrated else none, {"rule": rule})
             for name, (bits, calibrated, rule) in RULES.items()]
    rules += [PeerVariant("ours", f"{name} self", RULES[name][0], itself,
                          {"rule": RULES[name][2]}) for name in OWN_TEXT]
    recipes = [PeerVariant("ours", f"recipe {name}", bits, near if calibrated else none, {"recipe": name})
               for name, (bits, calibrated) in SHIPPED.items()]
    recipes += [PeerVariant("ours", f"recipe {name} default", bits, default, {"recipe": name})
                for name, (bits, calibrated) in SHIPPED.items() if calibrated]
    budgets = [PeerVariant("ours", name, bits, near, {"budget": budget, "symmetric": symmetric})
               for name, (bits, budget, symmetric) in BUDGETS.items()]
    return [*rules, *recipes, *budgets]


def others(group: int) -> list[PeerVariant]:
    """The other tools' methods, with a scale a row where ``group`` is -1."""
    none, default, near, _ = CalibrationKind

    def peer(tool: str, name: str, bits: int, calibration: CalibrationKind, symmetric: bool = True,
             **options: Any) -> PeerVariant:
        grid = f"int{bits}{'' if symmetric else ' asym'}"
        text = " default" if calibration == default else ""
        return PeerVariant(tool, f"{name} {grid}{text}".strip(), bits, calibration,
                           {"bits": bits, "group": group, "symmetric": symmetric, **options})

    sinq = "sinq" if group > 0 else "sinq_dual"  # 8-bit scales, which need 32 of them a layer, or float16
    quick = [PeerVariant("bitsandbytes", "nf4", 4)]
    quick += [peer("hqq", "", bits, none) for bits in (8, 4, 3, 2)]
    quick += [peer("sinq", "", bits, none, method=sinq) for bits in (8, 4, 3, 2)]
    quick.append(PeerVariant("sinq", "nf4", 4, none, {"bits": 4, "group": group, "method": "sinq_nf4"}))
    quick += [peer("autoround", "rtn", bits, none, symmetric, iters=0, plain=True)
              for bits, symmetric in ((8, True), (4, False), (3, False), (2, False))]
    quick.append(peer("gptqmodel", "rtn", 4, none, method="rtn"))
    unnamed = [peer("llmcompressor", "gptq", 4, default, method="gptq"),
               peer("llmcompressor", "awq", 4, default, method="awq"),
               peer("gptqmodel", "gptq", 4, default, method="gptq"),
               peer("autoround", "light", 4, default, **LIGHT)]
    grids = ((4, False), (3, False), (2, False), (8, True), (4, True))
    calibrated = [peer("llmcompressor", "gptq", bits, near, symmetric, method="gptq")
                 for bits, symmetric in grids]
    calibrated += [peer("gptqmodel", method, bits, near, method=method)
                  for bits in (4, 3, 2) for method in ("gptq", "gptaq", "foem")]
    calibrated.append(peer("gptqmodel", "gptq", 8, near, method="gptq"))
    calibrated.append(peer("llmcompressor", "awq", 4, near, False, method="awq"))
    calibrated += [peer("autoround", "light", bits, near, symmetric, **LIGHT) for bits, symmetric in grids]
    calibrated.append(peer("llmcompressor", "autoround", 4, near, False, method="autoround",
                          iters=LIGHT["iters"]))
    calibrated += [peer("gptqmodel", name, 4, near, method="paroquant", options=options)
                   for name, options in (("paroquant light", ROTATIONS), ("paroquant", {}))]
    calibrated += [peer("autoround", "tuned", 4, near, symmetric) for symmetric in (False, True)]
    return [*quick, *unnamed, *calibrated]


def recipe_text(shipped: str, grain: str) -> str:
    """A shipped recipe with its groups of 64 replaced by another grain."""
    return shipped.replace("{strategy: group, size: 64}", grain)
