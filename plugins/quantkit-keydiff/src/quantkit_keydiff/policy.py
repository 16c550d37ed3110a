"""KeyDiff: at the end of the prompt, keep the positions whose keys differ most from the others,
https://arxiv.org/abs/2504.15364.

It looks at keys alone. No query is kept and no attention computed, so a prompt is read as fast as without it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from quantkit.kv.base import MAX_TOKENS, PolicyView
from quantkit.kv.policies.score_policy import ScorePolicy, newest, stored


class KeyDiff(ScorePolicy):
    """Each KV head keeps the positions whose keys are least similar to the head's mean key.

    Attributes:
        window: the last ``window`` positions always stay: the answer continues them.
        sinks: the first ``sinks`` positions always stay: attention needs them
            (https://arxiv.org/abs/2309.17453).
    """

    name: ClassVar[str] = "keydiff"
    window: int = Field(default=32, ge=0, le=MAX_TOKENS)
    sinks: int = Field(default=4, ge=0, le=MAX_TOKENS)

    def score(self, view: PolicyView) -> torch.Tensor:
        """float32 ``[Hkv, S]``: the negative cosine between each key and the mean of the normalized keys."""
        keys = F.normalize(view.keys().float(), dim=-1)
        inside = stored(view, keys.device)
        mean = (keys * inside[..., None]).sum(1) / inside.sum(1, keepdim=True).clamp(min=1)
        scores = -F.cosine_similarity(keys, mean[:, None], dim=-1)
        budget = self.layer_budget(view)
        window = newest(view, min(self.window, budget, *view.lengths), keys.device)
        first = torch.arange(keys.shape[1], device=keys.device) < min(self.sinks, budget)
        return scores.masked_fill(window | first, torch.inf)
