"""Next-token sampling with per-row parameters, and the log-prob of what was drawn.

For logits l of one row, temperature t, top-k k and top-p p the token is drawn from

    q = softmax(l / t)                      t = 0: the arg-max alone
    S = {i : l_i >= k-th largest l}         k <= 0: everything
    S'= smallest most-probable part of q|S whose mass reaches p
    r = q restricted to S', normalised

and the reported log-prob is log r(token): that of the distribution actually sampled, so 0 for a
greedy row. Policy-gradient code that corrects for the rollout's distribution needs exactly this
number; it equals the model's own log-prob at temperature t when nothing is filtered.

Legend: B rows (samples being decoded), V vocabulary. Plain torch on any device, no gradient.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["SamplingParams", "filtered_log_probs", "sample_tokens"]


class SamplingParams(Protocol):
    """What a row's parameters must offer; `top_k` of 0 or -1 means off."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...


def _check(logits_BV: torch.Tensor, samplings: Sequence[SamplingParams]) -> None:
    if logits_BV.ndim != 2 or logits_BV.shape[0] != len(samplings):
        raise ValueError(
            f"logits must be [rows, vocabulary] with one row per sampling, got "
            f"{tuple(logits_BV.shape)} for {len(samplings)} samplings"
        )
    for row, sampling in enumerate(samplings):
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(
                f"row {row}: temperature must be >= 0 and top_p in (0, 1], got "
                f"temperature={sampling.temperature}, top_p={sampling.top_p}"
            )


def _keep_top_k(log_probs_BV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Mask everything below the k-th largest entry of each row; ties with it stay."""
    size = log_probs_BV.shape[-1]
    counts = [s.top_k if 0 < s.top_k < size else size for s in samplings]
    if min(counts) == size:
        return log_probs_BV
    largest = max(count for count in counts if count < size)
    top_BK = log_probs_BV.topk(largest, dim=-1).values
    index_B1 = log_probs_BV.new_tensor([min(c, largest) - 1 for c in counts], dtype=torch.long)
    bound_B1 = top_BK.gather(-1, index_B1.unsqueeze(-1))
    off_B1 = log_probs_BV.new_tensor([c == size for c in counts], dtype=torch.bool).unsqueeze(-1)
    return log_probs_BV.masked_fill((log_probs_BV < bound_B1) & ~off_B1, float("-inf"))


def _keep_top_p(log_probs_BV: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Mask tokens that come after the mass p is reached, in order of falling probability."""
    if all(s.top_p == 1 for s in samplings):
        return log_probs_BV
    sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = sorted_BV.softmax(dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    limit_B1 = log_probs_BV.new_tensor([s.top_p for s in samplings]).unsqueeze(-1)
    drop_BV = (before_BV >= limit_B1) & (limit_B1 < 1)
    drop_BV[:, 0] = False
    return log_probs_BV.masked_fill(
        torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), float("-inf")
    )


def filtered_log_probs(
    logits_BV: torch.Tensor, samplings: Sequence[SamplingParams]
) -> torch.Tensor:
    """Log-probs of the distribution each row is sampled from, fp32, -inf where filtered.

    Args:
        logits_BV: of the next token, any floating dtype.
        samplings: one per row.
    Raises:
        ValueError: shapes or parameters do not fit.
    """
    _check(logits_BV, samplings)
    greedy = [s.temperature == 0 for s in samplings]
    scale = [1.0 if g else s.temperature for g, s in zip(greedy, samplings, strict=True)]
    scaled_BV = logits_BV.float() / logits_BV.new_tensor(scale, dtype=torch.float32).unsqueeze(-1)
    kept_BV = _keep_top_p(_keep_top_k(scaled_BV, samplings), samplings)
    log_probs_BV = kept_BV.log_softmax(dim=-1)
    if not any(greedy):
        return log_probs_BV
    best_BV = torch.full_like(log_probs_BV, float("-inf"))
    best_BV.scatter_(-1, logits_BV.argmax(dim=-1, keepdim=True), 0.0)
    greedy_B1 = torch.tensor(greedy, device=logits_BV.device).unsqueeze(-1)
    return torch.where(greedy_B1, best_BV, log_probs_BV)


@torch.no_grad()
def sample_tokens(
    logits_BV: torch.Tensor,
    samplings: Sequence[SamplingParams],
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Every call draws for every row, greedy rows included, so that the random numbers a row gets do
    not depend on the parameters of the others.

    Args:
        logits_BV: of the next token, any floating dtype.
        samplings: one per row.
        generator: on the logits' device; None uses the global one.
    Returns:
        tokens_B (int64) and log_probs_B (fp32), under the distribution sampled from.
    """
    log_probs_BV = filtered_log_probs(logits_BV, samplings)
    tokens_B1 = torch.multinomial(log_probs_BV.exp(), 1, generator=generator)
    return tokens_B1.squeeze(-1), log_probs_BV.gather(-1, tokens_B1).squeeze(-1)
