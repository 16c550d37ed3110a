"""How far a model's next-token distribution is from the original's, and the gradient of that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quantkit.memory.quantize import BACKWARD_LOGITS
from quantkit.models.layers import RMSNorm
from quantkit.ops.rows import softcapped
from quantkit.quantization.calibration.finite import NonFiniteError


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
    gradients, total = torch.zeros_like(states), 0.0
    weight_gradient = None if weight is None else torch.zeros_like(weight)
    for start in range(0, states.shape[0], rows):
        part = slice(start, start + rows)
        with torch.set_grad_enabled(weight is not None):
            entered = states[part].detach().requires_grad_(weight is not None)
            normed = norm(entered)
        logits = softcapped((normed.detach() @ heads.quantized.T).float(), heads.softcap)
        target_logits = softcapped((targets[part] @ heads.original.T).float(), heads.softcap)
        target_log_probs = F.log_softmax(target_logits, dim=-1)
        del target_logits
        log_probs = F.log_softmax(logits, dim=-1)
        target_probs = target_log_probs.exp()
        loss = float((target_log_probs.sub_(log_probs).mul_(target_probs)).double().sum())
        if not math.isfinite(loss):
            raise NonFiniteError("the model's output is NaN or infinite")
        total += loss
        if weight is None or weight_gradient is None:
            continue
        logit_gradient = log_probs.exp_().sub_(target_probs).div_(count)
        if heads.softcap is not None:
            logit_gradient *= 1 - (logits / heads.softcap).square()
        gradients[part], more = torch.autograd.grad(normed, (entered, weight),
                                                    logit_gradient @ heads.quantized)
        weight_gradient += more
    return total / count, gradients, weight_gradient
