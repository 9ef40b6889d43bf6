"""The chunked rule in plain torch: autograd by construction, float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK_TOKENS", "chunked_rule"]

CHUNK_TOKENS = 64


def chunked_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See ``api.py``; as many key heads as value heads. Computes in the dtype of the state."""
    dtype = q.dtype
    q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))
    g, beta = (x.transpose(1, 2) for x in (g, beta))
    pieces = list(
        zip(*(x.split(CHUNK_TOKENS, dim=2) for x in (q * scale, k, v, g, beta)), strict=True)
    )
    outputs = []
    for number, (q_, k_, v_, g_, beta_) in enumerate(pieces, start=1):
        c = g_.cumsum(-1)
        between = _decay_between(c)
        change = _change(k_, v_, c, beta_, between, state)
        outputs.append(c.exp()[..., None] * (q_ @ state) + (between * (q_ @ k_.mT)) @ change)
        if number < len(pieces) or final_state:
            state = _next_state(k_, c, change, state)
    output = torch.cat(outputs, dim=2).transpose(1, 2).to(dtype)
    return output, state if final_state else None


def _change(
    k_CK: Tensor, v_CV: Tensor, c_C: Tensor, beta_C: Tensor, between_CC: Tensor, state_KV: Tensor
) -> Tensor:
    """U [C, V]: what each token of a chunk writes; all tensors have [B, N] in front."""
    mix_CC = beta_C[..., None] * between_CC * (k_CK @ k_CK.mT)
    wanted_CV = beta_C[..., None] * (v_CV - c_C.exp()[..., None] * (k_CK @ state_KV))
    change_CV: Tensor = torch.linalg.solve_triangular(
        mix_CC, wanted_CV, upper=False, unitriangular=True
    )
    return change_CV


def _next_state(k_CK: Tensor, c_C: Tensor, change_CV: Tensor, state_KV: Tensor) -> Tensor:
    end = c_C[..., -1:]
    to_end = (end - c_C).exp()[..., None]
    return end.exp()[..., None] * state_KV + (to_end * k_CK).mT @ change_CV


def _decay_between(c: Tensor) -> Tensor:
    """exp(c_i - c_j) for j <= i, else 0, which an overflow of what is cut away must not touch."""
    tokens = c.shape[-1]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=c.device).triu(1)
    return (c[..., :, None] - c[..., None, :]).masked_fill(future, float("-inf")).exp()
