"""What :mod:`quality` compares: recipes as they are shipped, rules of ours, and the other tools' settings."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    "int8": (8, False), "int8-gptq": (8, True), "int5-asym": (5, True), "int4": (4, True),
    "int4-asym": (4, True), "nf4": (4, False), "trellis3": (3, True),
}
TYPED = ("int4", "int4-asym")  # also on the text that a recipe takes where none is named


@dataclass(frozen=True)
class PeerVariant:
    """One way to quantize, by one peer."""

    peer: str
    name: str
    bits: int
    calibrated: bool
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of its files."""
        return f"{self.peer}-{self.name}".strip("-").replace(" ", "-")


UNQUANTIZED = PeerVariant("", "unquantized", 16, False)


def variants(group: int) -> list[PeerVariant]:
    """All of them, quick ones first."""
    ours = [PeerVariant("ours", name, bits, data, {"rule": rule})
            for name, (bits, data, rule) in RULES.items()]
    ours += [PeerVariant("ours", f"{name} self", bits, True, {"rule": rule, "text": "self"})
             for name, (bits, _, rule) in RULES.items() if name in OWN_TEXT]
    if group == 64:
        ours += [PeerVariant("ours", f"recipe {name}", bits, data, {"recipe": name})
                 for name, (bits, data) in SHIPPED.items()]
        ours += [PeerVariant("ours", f"recipe {name} as typed", SHIPPED[name][0], True,
                             {"recipe": name, "text": "builtin"}) for name in TYPED]
    ours += [PeerVariant("ours", name, bits, True, {"budget": budget, "symmetric": symmetric})
             for name, (bits, budget, symmetric) in BUDGETS.items()]
    quick = [variant for variant in ours if not variant.calibrated]
    quick.append(PeerVariant("bitsandbytes", "nf4", 4, False))
    quick += [PeerVariant("hqq", f"int{bits}", bits, False, {"bits": bits, "group": group})
              for bits in (8, 4, 3, 2)]
    grids = [(4, True), (4, False), (3, True), (3, False), (2, False), (8, True)]
    slow = [PeerVariant("llmcompressor", f"gptq int{bits}{'' if symmetric else ' asym'}", bits, True,
                        {"bits": bits, "group": group, "symmetric": symmetric}) for bits, symmetric in grids]
    slow += [PeerVariant("gptqmodel", f"gptq int{bits}", bits, True,
                         {"bits": bits, "group": group, "symmetric": True}) for bits in (4, 3, 2, 8)]
    slow += [PeerVariant("autoround",
                         f"autoround int{bits}{'' if symmetric else ' asym'}{' light' * bool(more)}", bits,
                         True, {"bits": bits, "group": group, "symmetric": symmetric, **more})
             for bits, symmetric, more in ((4, True, {}), (4, False, {}), (3, False, LIGHT),
                                           (2, False, LIGHT), (8, True, LIGHT))]
    return [*quick, *(variant for variant in ours if variant.calibrated), *slow]
