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

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Impl, Page, segment_attention
from longstraw_backend.kernels.spans import Span, check_spans

from .selected import SelectedAttention

__all__ = ["LatentAttention", "dense_mla", "sparse_mla", "sparse_mla_part"]


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
    page_grads: Sequence[Tensor | None] | None = None,
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
        page_grads: for each page where the backward adds its gradient, in place, [T, C], or None
            for a constant; by default all are. Wider dtypes and CPU memory are welcome.

    Returns:
        Out in the dtype of q, and log-sum-exp; 0 and -inf for a query with no token. Both are
        differentiable in q and in latents; gradients of pages come through ``page_grads`` alone.

    Raises:
        ValueError: a shape, dtype, device or position does not fit; the text says which.
    """
    _check(q_SNC, latents_SC, value_dim)
    return sparse_mla_part(
        q_SNC,
        Span(start, latents_SC),
        selection_SK,
        pages,
        scale=scale,
        value_dim=value_dim,
        page_grads=page_grads,
    )


def sparse_mla_part(
    q_SNC: Tensor,
    own: Span,
    selection_SK: Tensor,
    pages: Sequence[Span],
    *,
    scale: float,
    value_dim: int,
    page_grads: Sequence[Tensor | None] | None = None,
) -> LatentAttention:
    """:func:`sparse_mla` on one of several owners of tokens, also of the new ones.

    Args:
        own: latents and rotated keys [T, C] of those new tokens that this owner computed, with
            gradient; the queries are those of any tokens. The other arguments are the same.

    Returns:
        Attention to those selected tokens that ``own`` or ``pages`` hold.

    Raises:
        ValueError: as :func:`sparse_mla`.
    """
    if selection_SK.dim() != 2 or selection_SK.shape[0] != q_SNC.shape[0]:
        raise ValueError(
            f"selection: expected [{q_SNC.shape[0]}, K], got {tuple(selection_SK.shape)}"
        )
    if selection_SK.is_floating_point() or selection_SK.device != q_SNC.device:
        raise ValueError(
            f"selection: expected integers on {q_SNC.device}, got {selection_SK.dtype} on "
            f"{selection_SK.device}"
        )
    check_spans("pages", pages, own.rows, own.start)
    starts = (*(page.start for page in pages), own.start)
    rows = (*(page.rows for page in pages), own.rows)
    with torch.autocast(q_SNC.device.type, enabled=False):  # scores are wide, whatever the caller's
        grads = [None] * len(pages) if page_grads is None else list(page_grads)
        out, lse = SelectedAttention.apply(
            q_SNC, selection_SK, scale, value_dim, grads, starts, *rows
        )
    return LatentAttention(out, lse)


def dense_mla(
    q_BSNC: Tensor,
    latents_BSC: Tensor,
    pages: Sequence[Tensor],
    *,
    scale: float,
    value_dim: int,
    page_grads: Sequence[Tensor | None] | None = None,
    attention: Callable[..., Tensor] = segment_attention,
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
        page_grads: as for ``sparse_mla``, in the shapes of the pages.
        attention: ``segment_attention``, or its like over several owners.

    Returns:
        [B, S, N, V] in the dtype of q. Differentiable in q and latents; gradients of pages come
        through ``page_grads`` alone.

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
    held = [_as_key_and_value(page) for page in pages]
    grads = [g if g is None else _as_key_and_value(g) for g in page_grads or [None] * len(pages)]
    impl: Impl = "cpu" if q_BSNC.device.type == "cpu" else "reference"
    q_BNSC = q_BSNC.transpose(1, 2)
    with torch.autocast(q_BSNC.device.type, enabled=False):
        out = attention(q_BNSC, own, own, held, scale=scale, impl=impl, page_grads=grads)
    return out[..., :value_dim].transpose(1, 2)


def _as_key_and_value(x_BTC: Tensor) -> Page:
    """Both the same memory: as a gradient, what is added to either counts."""
    return Page(x_BTC[:, None], x_BTC[:, None])


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
