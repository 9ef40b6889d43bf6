"""Per-token log-probabilities and entropies from hidden states, without the [tokens, vocab] matrix.

Legend: T tokens, D hidden size, V vocabulary.

    z = W h / tau            logits of a token, float32 (float64 for float64 weights)
    log p(y) = z_y - logsumexp(z)
    H = logsumexp(z) - sum_v p_v z_v

The logits of one chunk of tokens exist at a time, in the forward and again, recomputed, in the
backward:

    d log p(y) / dz = onehot(y) - p,        dH / dz = -p (z - logsumexp(z) + H)

Several public heads fuse this down to a scalar loss; policy-gradient ratios need the values per
token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LogProbs", "logprob_head"]


class LogProbs(NamedTuple):
    """Log-probability of each target and entropy of each distribution, [T] each, in nats.

    ``entropy`` is zero where it was not asked for. A tuple, so that FSDP finds the tensors in it.
    """

    log_probs: Tensor
    entropy: Tensor


def logprob_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    entropy: bool = False,
    chunk_tokens: int = 1024,
) -> LogProbs:
    """Log-probabilities of the targets under softmax(W h / temperature), and entropies.

    Args:
        hidden_TD: last hidden states, [T, D].
        weight_VD: output embedding, [V, D]; logits are computed in its dtype, then widened.
        targets_T: token ids, [T], int64.
        temperature: a positive number, or one per token, [T].
        entropy: whether to compute entropies.
        chunk_tokens: tokens whose logits exist at one time.

    Returns:
        LogProbs in float32 (float64 for float64 weights), differentiable in hidden and weight,
        not in temperature.

    Raises:
        ValueError: shapes disagree, or chunk_tokens or the temperature is not positive.
    """
    tokens = hidden_TD.shape[0]
    if targets_T.shape != (tokens,) or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_TD.shape)}, weight {tuple(weight_VD.shape)}, "
            f"targets {tuple(targets_T.shape)}: expected [T, D], [V, D], [T]"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected at least 1, got {chunk_tokens}")
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    tau_T = torch.as_tensor(temperature, dtype=wide, device=hidden_TD.device)
    if tau_T.shape not in ((), (tokens,)) or not (tau_T > 0).all():
        raise ValueError(
            f"temperature: expected a positive number, or {tokens} of them, got {temperature!r}"
        )
    tau_T = tau_T.expand(tokens)
    return LogProbs(
        *_LogProbHead.apply(hidden_TD, weight_VD, targets_T, tau_T, entropy, chunk_tokens)
    )


def _chunk_logits(hidden: Tensor, weight: Tensor, tau: Tensor) -> Tensor:
    return (hidden.to(weight.dtype) @ weight.mT).to(tau.dtype) / tau[:, None]


class _LogProbHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tau: Tensor,
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        log_probs, lse, ent = (
            torch.zeros_like(tau, memory_format=torch.contiguous_format) for _ in range(3)
        )
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _chunk_logits(hidden[part], weight, tau[part])
            lse[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - lse[part]
            if entropy:
                probs = (logits - lse[part, None]).exp()
                ent[part] = lse[part] - (probs * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, tau, lse, ent)
        ctx.entropy, ctx.chunk = entropy, chunk
        return log_probs, ent

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor, dent: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, tau, lse, ent = ctx.saved_tensors
        dhidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _chunk_logits(hidden[part], weight, tau[part]) - lse[part, None]
            coefficient = dlog_probs[part, None]
            if ctx.entropy:
                coefficient = coefficient + dent[part, None] * (log_p + ent[part, None])
            dlogits = -coefficient * log_p.exp()
            dlogits.scatter_add_(1, targets[part, None], dlog_probs[part, None])
            dlogits = (dlogits / tau[part, None]).to(weight.dtype)
            if dhidden is not None:
                dhidden[part] = (dlogits @ weight).to(hidden.dtype)
            if dweight is not None:
                dweight += dlogits.mT @ hidden[part].to(weight.dtype)
        return dhidden, dweight, None, None, None, None
