"""Attention of new tokens over resident key/value pages and, causally, over themselves.

Legend: B rows, N query heads, K key/value heads, G = N / K, T new tokens, S page tokens,
H head dim.

    o = merge(attend(q, page_1), ..., attend(q, page_n), attend_causal(q, k, v))

Each partial attention returns its output o_i and log-sum-exp l_i; they are merged exactly by

    l = logsumexp_i l_i,    o = sum_i exp(l_i - l) o_i          (Milakov & Gimelshein, 1805.02867)

The backward of every part needs only the merged o and l (the softmax over all keys is
exp(q k^T - l), whichever part a key lies in; FlashAttention, 2205.14135, section 3.1), so no
score matrix larger than the kernel's own tile exists at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import Staging, reachable

from .kept import Kept
from .partial import Impl, choose_impl, get_partial
from .parts import How, Merge, Page, back_over_own, back_over_pages, over_own, over_pages, pages_of

__all__ = ["check_inputs", "how_to", "segment_attention"]


def segment_attention(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    pages: Sequence[Page],
    *,
    scale: float,
    impl: Impl | None = None,
    staging: Staging = "segments",
    page_grads: Sequence[Page | None] | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Attend from T new tokens to all pages and causally to the new tokens.

    Args:
        q_BNTH: queries, [B, N, T, H].
        k_BKTH: keys of the new tokens, [B, K, T, H], N a multiple of K.
        v_BKTH: values of the new tokens, [B, K, T, H].
        pages: resident tokens before the new ones, in order. A page of batch 1 is shared by all
            rows; a page of batch B belongs to them row by row.
        scale: factor on the scores.
        impl: ``reference``, ``cpu``, ``flash`` or ``cudnn``; by default what the device and dtype
            allow.
        staging: how pages in CPU memory come to the device, in the forward and again in the
            backward; see ``staged``. It changes no bit, and the graph keeps no copy.
        page_grads: for each page where the backward adds its gradient, in place, or None for a
            constant; by default all are. Same shapes as the page, batch 1 or B; wider dtypes and
            CPU memory are welcome.
        kept: spares a recomputation of this call its forward.

    Returns:
        [B, N, T, H] in the dtype of q. Differentiable in q, k and v; gradients of pages come
        through ``page_grads`` alone, a page at a time.

    Raises:
        ValueError: a shape, dtype or device does not fit; the text says which.
    """
    check_inputs(q_BNTH, k_BKTH, v_BKTH, pages)
    how = how_to(q_BNTH, scale, impl, staging)
    grads = [None] * len(pages) if page_grads is None else list(page_grads)
    flat = [t for page in pages for t in page]
    out: Tensor = _SegmentAttention.apply(q_BNTH, k_BKTH, v_BKTH, how, grads, kept, *flat)
    return out


def how_to(q: Tensor, scale: float, impl: Impl | None, staging: Staging) -> How:
    """The kernel that was asked for, or the one for the device and dtype of q."""
    return How(scale, get_partial(impl or choose_impl(q.device, q.dtype)), staging)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, pages: Sequence[Page]) -> None:
    """Raise ValueError, naming the argument, unless all go together."""
    if q.dim() != 4 or q.shape[2] == 0:  # no tokens end the process in torch's kernels
        raise ValueError(f"q: expected [B, N, T, H] with T >= 1, got {tuple(q.shape)}")
    rows, heads, tokens, dim = q.shape
    if k.shape != v.shape or k.shape[0] != rows or tuple(k.shape[2:]) != (tokens, dim):
        raise ValueError(
            f"k, v: expected [{rows}, K, {tokens}, {dim}] to go with q, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if any(t.dtype != q.dtype or t.device != q.device for t in (k, v)):
        raise ValueError(
            f"k, v: expected {q.dtype} on {q.device} as q, got {k.dtype} on {k.device} and "
            f"{v.dtype} on {v.device}"
        )
    if heads % k.shape[1]:
        raise ValueError(f"q: {heads} query heads are no multiple of {k.shape[1]} key/value heads")
    for i, (pk, pv) in enumerate(pages):
        if (
            pk.shape != pv.shape
            or pk.dim() != 4
            or pk.shape[2] == 0
            or pk.shape[0] not in (1, rows)
            or pk.shape[1] != k.shape[1]
            or pk.shape[3] != dim
        ):
            raise ValueError(
                f"pages[{i}]: expected k, v of [1 or {rows}, {k.shape[1]}, S, {dim}], "
                f"got {tuple(pk.shape)} and {tuple(pv.shape)}"
            )
        if any(t.dtype != q.dtype or not reachable(t, q.device) for t in (pk, pv)):
            raise ValueError(
                f"pages[{i}]: captured as {pk.dtype} on {pk.device}, queries are {q.dtype} on "
                f"{q.device}; capture and replay must use the same dtype, and the same device or "
                "CPU memory"
            )


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: How,
        page_grads: Sequence[Page | None],
        kept: Kept | None,
        *flat: Tensor,
    ) -> Tensor:
        def attended() -> tuple[Tensor, Tensor]:
            merged = Merge(*over_own(q, k, v, how))
            over_pages(merged, q, pages_of(flat), how)
            return merged.out.to(q.dtype), merged.lse

        out, lse = attended() if kept is None else kept.once(attended)
        ctx.save_for_backward(q, k, v, out, lse, *flat)
        ctx.how, ctx.page_grads = how, page_grads
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *flat = ctx.saved_tensors
        dq, dk, dv = back_over_own(dout, q, k, v, out, lse, ctx.how)
        back_over_pages(dq, dout, q, out, lse, pages_of(flat), ctx.page_grads, ctx.how)
        return (dq.to(q.dtype), dk, dv, *([None] * (3 + len(flat))))
