"""Absorbed multi-head latent attention over resident latents and the new tokens' own.

In MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1) head n has key [W_k,n c_t, r_t] and value
W_v,n c_t for a token with latent c_t and rotated r_t, both shared by all heads. With W_k,n moved to
the query and W_v,n to the output, attention needs no expanded key or value:

    x[s, n, t] = scale * (q[s, n] . [c_t, r_t])        q[s, n] = [W_k,n^T q_nope, rope(q_rope)]
    o[s, n]    = sum_t softmax_t(x[s, n, t]) c_t       the caller applies W_v,n

so both projections are on the side of the new tokens and have their gradient through latents of
resident tokens too. ``sparse_mla`` sums over selected t only (DSA), ``dense_mla`` over all t <= s.

Legend: B rows, S new tokens, N heads, C = latent and RoPE width (512 + 64), V latent width,
K selected tokens of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Impl, Page, segment_attention
from longstraw_backend.kernels.spans import Span, check_spans

from .selected import SelectedAttention

__all__ = ["LatentAttention", "dense_mla", "sparse_mla"]


class LatentAttention(NamedTuple):
    """Output [S, N, V] in the latent space, and log-sum-exp [S, N] in float32 or float64."""

    out: Tensor
    lse: Tensor


def sparse_mla(
    q_SNC: Tensor,
    latents_SC: Tensor,
    selection_SK: Tensor,
    pages: Sequence[Span],
    *,
    start: int,
    scale: float,
    value_dim: int,
) -> LatentAttention:
    """Attend from each new token to the tokens selected for it, resident or new.

    Args:
        q_SNC: absorbed queries, the latent part first, [S, N, C].
        latents_SC: latents and rotated keys of the new tokens, [S, C].
        selection_SK: absolute positions, int32 [S, K], each at most once in a row and none after
            its query; -1 is no token. Positions that no page holds count as -1: on one of several
            owners the result is its part, to be merged by log-sum-exp.
        pages: latents and rotated keys of resident tokens, all before ``start``, on the device of q
            or in CPU memory: those are on the device, all of them, while this runs.
        start: absolute position of the first new token.
        scale: factor on the scores.
        value_dim: V, how much of C is the latent.

    Returns:
        Out in the dtype of q, and log-sum-exp; 0 and -inf for a query with no token. Both are
        differentiable in q, in latents, and in those pages that require grad: pages captured
        without autograd receive none.

    Raises:
        ValueError: a shape, dtype, device or position does not fit; the text says which.
    """
    _check(q_SNC, latents_SC, value_dim)
    if selection_SK.dim() != 2 or selection_SK.shape[0] != q_SNC.shape[0]:
        raise ValueError(
            f"selection: expected [{q_SNC.shape[0]}, K], got {tuple(selection_SK.shape)}"
        )
    if selection_SK.is_floating_point() or selection_SK.device != q_SNC.device:
        raise ValueError(
            f"selection: expected integers on {q_SNC.device}, got {selection_SK.dtype} on "
            f"{selection_SK.device}"
        )
    check_spans("pages", pages, latents_SC, start)
    starts = (*(page.start for page in pages), start)
    rows = (*(page.rows for page in pages), latents_SC)
    with torch.autocast(q_SNC.device.type, enabled=False):  # scores are wide, whatever the caller's
        out, lse = SelectedAttention.apply(q_SNC, selection_SK, scale, value_dim, starts, *rows)
    return LatentAttention(out, lse)


def dense_mla(
    q_BSNC: Tensor,
    latents_BSC: Tensor,
    pages: Sequence[Tensor],
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attend from each new token to all resident tokens and causally to the new ones.

    The latent is both key and value of one key/value head, so this is ``segment_attention`` with
    values as wide as keys, of which the RoPE part is dropped; pages are not copied. On CUDA, where
    no fused kernel of torch takes heads of this width, that is its reference: [N S, page] scores.

    Args:
        q_BSNC: absorbed queries, the latent part first, [B, S, N, C].
        latents_BSC: latents and rotated keys of the new tokens, [B, S, C].
        pages: the same of resident tokens in order, [1 or B, T_i, C] each; in CPU memory too, from
            which they come one by one.

    Returns:
        [B, S, N, V] in the dtype of q. Differentiable in q and latents; pages receive no gradient.

    Raises:
        ValueError: a shape, dtype or device does not fit; the text says which.
    """
    if q_BSNC.dim() != 4 or latents_BSC.shape[:2] != q_BSNC.shape[:2]:
        raise ValueError(
            "q, latents: expected [B, S, N, C] and [B, S, C], got "
            f"{tuple(q_BSNC.shape)} and {tuple(latents_BSC.shape)}"
        )
    _check(q_BSNC.flatten(0, 1), latents_BSC.flatten(0, 1), value_dim)
    own = latents_BSC[:, None]
    held = [Page(page[:, None], page[:, None]) for page in pages]
    impl: Impl = "cpu" if q_BSNC.device.type == "cpu" else "reference"
    q_BNSC = q_BSNC.transpose(1, 2)
    with torch.autocast(q_BSNC.device.type, enabled=False):
        out = segment_attention(q_BNSC, own, own, held, scale=scale, impl=impl)
    return out[..., :value_dim].transpose(1, 2)


def _check(q: Tensor, latents: Tensor, value_dim: int) -> None:
    if q.dim() != 3 or 0 in q.shape:
        raise ValueError(f"q: expected [S, N, C] with S, N, C >= 1, got {tuple(q.shape)}")
    if tuple(latents.shape) != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"latents: expected [{q.shape[0]}, {q.shape[2]}], got {tuple(latents.shape)}"
        )
    if latents.dtype != q.dtype or latents.device != q.device:
        raise ValueError(
            f"latents: expected {q.dtype} on {q.device} as q, got {latents.dtype} on "
            f"{latents.device}"
        )
    if not 0 < value_dim <= q.shape[2]:
        raise ValueError(f"value_dim: expected 1 to {q.shape[2]}, got {value_dim}")
