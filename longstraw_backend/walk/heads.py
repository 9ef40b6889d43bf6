"""What a call of the model returns: log-probs of targets, or the last token's logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longstraw_backend.kernels.logprob_head import LogProbs, logprob_head
from longstraw_backend.models import Head

__all__ = ["last_logits", "log_probs_head"]


def last_logits(
    hidden_BTD: Tensor, weight_VD: Tensor, linear: Callable[..., Tensor]
) -> tuple[Tensor, ...]:
    """Decode: logits of each row's last token, [B, V], float32 or wider."""
    logits = linear(hidden_BTD[:, -1])
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)),)


def log_probs_head(
    targets: Tensor, temperature: float, *, entropy: bool, chunk_tokens: int
) -> Head:
    """Score and replay: log-probs (and entropies) of the targets, [B, T] or, of a single row, [T];
    in the same shape."""

    def head(hidden_BTD: Tensor, weight: Tensor, _: Callable[..., Tensor]) -> LogProbs:
        device = hidden_BTD.device.type
        if torch.is_autocast_enabled(device):
            weight = weight.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            out = logprob_head(
                hidden_BTD.flatten(0, 1),
                weight,
                targets.flatten(),
                temperature=temperature,
                entropy=entropy,
                chunk_tokens=chunk_tokens,
            )
            return LogProbs(*(x.view(targets.shape) for x in out))

    return head
