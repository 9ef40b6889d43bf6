"""The chunked rule in plain torch: autograd by construction, float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK_TOKENS", "chunked_rule"]

CHUNK_TOKENS = 64


def chunked_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``api.py``; as many key heads as value heads. Computes in the dtype of the state."""
    dtype = q.dtype
    q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))
    g, beta = (x.transpose(1, 2) for x in (g, beta))
    pieces = (x.split(CHUNK_TOKENS, dim=2) for x in (q * scale, k, v, g, beta))
    outputs = []
    for q_, k_, v_, g_, beta_ in zip(*pieces, strict=True):
        output, state = _chunk(q_, k_, v_, g_, beta_, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), state


def _chunk(
    q_CK: Tensor, k_CK: Tensor, v_CV: Tensor, g_C: Tensor, beta_C: Tensor, state_KV: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of every row and head; all tensors have [B, N] in front."""
    c = g_C.cumsum(-1)
    decay = c.exp()[..., None]
    between_CC = _decay_between(c)
    mix_CC = beta_C[..., None] * between_CC * (k_CK @ k_CK.mT)
    wanted_CV = beta_C[..., None] * (v_CV - decay * (k_CK @ state_KV))
    u_CV = torch.linalg.solve_triangular(mix_CC, wanted_CV, upper=False, unitriangular=True)
    output = decay * (q_CK @ state_KV) + (between_CC * (q_CK @ k_CK.mT)) @ u_CV
    to_end = (c[..., -1:] - c).exp()[..., None]
    return output, decay[..., -1:, :] * state_KV + (to_end * k_CK).mT @ u_CV


def _decay_between(c: Tensor) -> Tensor:
    """exp(c_i - c_j) for j <= i, else 0, which an overflow of what is cut away must not touch."""
    tokens = c.shape[-1]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=c.device).triu(1)
    return (c[..., :, None] - c[..., None, :]).masked_fill(future, float("-inf")).exp()
