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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import Staging, reachable, staged

from .partial import Impl, Partial, choose_impl, get_partial

__all__ = ["Page", "segment_attention"]


class Page(NamedTuple):
    """Keys (after RoPE) and values of consecutive resident tokens, [1 or B, K, S, H] each.

    On the device of the queries, or in CPU memory, which should then be pinned.
    """

    k: Tensor
    v: Tensor


def segment_attention(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    pages: Sequence[Page],
    *,
    scale: float,
    impl: Impl | None = None,
    staging: Staging = "segments",
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

    Returns:
        [B, N, T, H] in the dtype of q. Differentiable in q, k and v. Pages were captured without
        autograd and receive no gradient.

    Raises:
        ValueError: a shape, dtype or device does not fit; the text says which.
    """
    _check(q_BNTH, k_BKTH, v_BKTH, pages)
    impl = choose_impl(q_BNTH.device, q_BNTH.dtype) if impl is None else impl
    flat = [t for page in pages for t in page]
    how = scale, get_partial(impl), staging
    out: Tensor = _SegmentAttention.apply(q_BNTH, k_BKTH, v_BKTH, *how, *flat)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, pages: Sequence[Page]) -> None:
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


def _fold(x_BNTH: Tensor, kv_heads: int, shared: bool) -> Tensor:
    """Queries of one key/value head side by side: [B, K, G*T, H]; [1, K, B*G*T, H] if shared."""
    rows, heads, tokens, dim = x_BNTH.shape
    x = x_BNTH.reshape(rows, kv_heads, heads // kv_heads * tokens, dim)
    if not shared or rows == 1:
        return x
    return x.transpose(0, 1).reshape(1, kv_heads, -1, dim)


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of :func:`_fold`; ``x`` may lack the head dim (a log-sum-exp)."""
    rows, heads, tokens = like.shape[:3]
    tail = x.shape[3:]
    if x.shape[0] != rows:
        x = x.reshape(x.shape[1], rows, -1, *tail).transpose(0, 1)
    return x.reshape(rows, heads, tokens, *tail)


def _expand(x_BKTH: Tensor, heads: int) -> Tensor:
    return x_BKTH.repeat_interleave(heads // x_BKTH.shape[1], dim=1)


def _pairs(flat: Sequence[Tensor]) -> list[Page]:
    return [Page(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]


class _Merge:
    """Running merge of partial outputs by log-sum-exp, in the dtype of the log-sum-exp."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out.to(lse.dtype), lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        total = torch.logaddexp(self.lse, lse)
        self.out = (
            self.out * (self.lse - total).exp()[..., None] + out * (lse - total).exp()[..., None]
        )
        self.lse = total


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        partial: Partial,
        staging: Staging,
        *flat: Tensor,
    ) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        merged = _Merge(*partial.forward(q, _expand(k, heads), _expand(v, heads), True, scale))
        for pk, pv in staged(_pairs(flat), q.device, staging):
            shared = pk.shape[0] == 1
            out, lse = partial.forward(_fold(q, kv_heads, shared), pk, pv, False, scale)
            merged.add(_unfold(out, q), _unfold(lse, q))
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, *flat)
        ctx.scale, ctx.partial, ctx.staging = scale, partial, staging
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *flat = ctx.saved_tensors
        heads, kv_heads = q.shape[1], k.shape[1]
        partial: Partial = ctx.partial
        dq, dk, dv = partial.backward(
            dout, q, _expand(k, heads), _expand(v, heads), out, lse, True, ctx.scale
        )
        dq = dq.to(lse.dtype)
        for pk, pv in staged(_pairs(flat), q.device, ctx.staging):
            shared = pk.shape[0] == 1
            dout_, q_, out_ = (_fold(x, kv_heads, shared) for x in (dout, q, out))
            lse_ = _fold(lse[..., None], kv_heads, shared)[..., 0]
            dq += _unfold(partial.backward_q(dout_, q_, pk, pv, out_, lse_, ctx.scale), q)
        shape = (*k.shape[:2], heads // kv_heads, *k.shape[2:])
        dk, dv = dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)
        return (dq.to(q.dtype), dk, dv, None, None, None, *([None] * len(flat)))
