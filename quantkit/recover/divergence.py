"""How far a model's next-token distribution is from the original's, and the gradient of that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantkit.calibrate.finite import NonFiniteError
from quantkit.calibrate.sizes import BACKWARD_LOGITS
from quantkit.models.layers import RMSNorm
from quantkit.ops.activation import softcapped


@dataclass(frozen=True)
class Heads:
    """Matrices ``[vocab, hidden]`` that make logits of normalized hidden states.

    Attributes:
        original: of the original model.
        quantized: of the quantized model; the same tensor if the head isn't quantized.
        softcap: of the logits, if the model has any.
    """

    original: torch.Tensor
    quantized: torch.Tensor
    softcap: float | None


def divergence(heads: Heads, norm: RMSNorm, states: torch.Tensor, targets: torch.Tensor, count: int,
               weight: torch.Tensor | None = None) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """``KL(original || quantized)``, summed over tokens and divided by ``count``.

    Args:
        heads: of both models.
        norm: the quantized model's final norm.
        states: what its last layer leaves, ``[tokens, hidden]``.
        targets: what the original model's final norm gives, of the same shape.
        count: of the tokens of which a mean is wanted.
        weight: the leaf that ``norm`` was made of, if gradients are wanted.

    Returns:
        The divergence; its gradients at ``states`` and at ``weight``, zeros and ``None`` without it.

    Raises:
        NonFiniteError: a logit isn't finite.
    """
    rows = max(1, -(-BACKWARD_LOGITS // heads.original.shape[0]))
    slopes, total = torch.zeros_like(states), 0.0
    of_weight = None if weight is None else torch.zeros_like(weight)
    for start in range(0, states.shape[0], rows):
        part = slice(start, start + rows)
        with torch.set_grad_enabled(weight is not None):
            entered = states[part].detach().requires_grad_(weight is not None)
            normed = norm(entered)
        logits = softcapped((normed.detach() @ heads.quantized.T).float(), heads.softcap)
        wanted = F.log_softmax(softcapped((targets[part] @ heads.original.T).float(), heads.softcap), dim=-1)
        chances = F.log_softmax(logits, dim=-1)
        likely = wanted.exp()
        here = float((wanted.sub_(chances).mul_(likely)).double().sum())
        if here != here or here in (float("inf"), -float("inf")):
            raise NonFiniteError("the model's output is NaN or infinite")
        total += here
        if weight is None or of_weight is None:
            continue
        slope = chances.exp_().sub_(likely).div_(count)
        if heads.softcap is not None:
            slope *= 1 - (logits / heads.softcap).square()
        slopes[part], more = torch.autograd.grad(normed, (entered, weight), slope @ heads.quantized)
        of_weight += more
    return total / count, slopes, of_weight
