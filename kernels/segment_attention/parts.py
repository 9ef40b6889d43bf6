"""The parts that attention over pages is made of, forward and backward, and how they merge.

``api.py`` has the maths. Legend: B rows, N query heads, K key/value heads, G = N / K, T query
tokens, S page tokens, H head dim. Queries [B, N, T, H], keys and values [B, K, T, H], log-sum-exp
[B, N, T] in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import Staging, add_over, staged

from .partial import Partial

__all__ = [
    "How",
    "Merge",
    "Page",
    "back_over_own",
    "back_over_pages",
    "over_own",
    "over_pages",
    "pages_of",
]


class Page(NamedTuple):
    """Keys (after RoPE) and values of consecutive resident tokens, [1 or B, K, S, H] each.

    On the device of the queries, or in CPU memory, which should then be pinned.
    """

    k: Tensor
    v: Tensor


def pages_of(flat: Sequence[Tensor]) -> list[Page]:
    """Pages from their tensors one after another, as autograd takes them."""
    return [Page(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]


class How(NamedTuple):
    """Factor on the scores, kernel, and how pages in CPU memory come to the device."""

    scale: float
    partial: Partial
    staging: Staging


class Merge:
    """Running merge of parts by log-sum-exp, in the dtype of the log-sum-exp and in place:
    the first part's output is given away."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out.to(lse.dtype), lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        """One more part; a query without keys in it has an output of 0 and -inf."""
        total = torch.logaddexp(self.lse, lse)
        self.out.mul_((self.lse - total).exp()[..., None])
        self.out.addcmul_(out, (lse - total).exp()[..., None])
        self.lse = total


def over_own(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Causal attention among new tokens."""
    heads = q.shape[1]
    return how.partial.forward(q, _expand(k, heads), _expand(v, heads), True, how.scale)


def over_pages(merged: Merge | None, q: Tensor, pages: Sequence[Page], how: How) -> Merge | None:
    """Add the parts of pages to what is merged so far; None if there is nothing at all."""
    for k, v in staged(pages, q.device, how.staging):
        out, lse = how.partial.forward(_fold(q, k), k, v, False, how.scale)
        out, lse = _unfold(out, q), _unfold(lse, q)
        if merged is None:
            merged = Merge(out, lse)
        else:
            merged.add(out, lse)
    return merged


def back_over_own(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the causal part, from the merged output and log-sum-exp; dq is wide."""
    heads, kv_heads = q.shape[1], k.shape[1]
    dq, dk, dv = how.partial.backward(
        dout, q, _expand(k, heads), _expand(v, heads), out, lse, True, how.scale
    )
    shape = (*k.shape[:2], heads // kv_heads, *k.shape[2:])
    return dq.to(lse.dtype), dk.reshape(shape).sum(2), dv.reshape(shape).sum(2)


def back_over_pages(
    dq: Tensor,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    pages: Sequence[Page],
    grads: Sequence[Page | None],
    how: How,
) -> None:
    """Add the pages' part to ``dq``, which is wide, and their own gradients to ``grads``."""
    for (k, v), grad in zip(staged(pages, q.device, how.staging), grads, strict=True):
        folded = [_fold(x, k) for x in (dout, q)], [_fold(out, k), _fold(lse[..., None], k)[..., 0]]
        (dout_, q_), (out_, lse_) = folded
        if grad is None:
            dq_ = how.partial.backward_q(dout_, q_, k, v, out_, lse_, how.scale)
        else:
            dq_, *dpage = how.partial.backward(dout_, q_, k, v, out_, lse_, False, how.scale)
            for into, dx in zip(grad, dpage, strict=True):
                add_over(into, dx)
        dq += _unfold(dq_, q)


def _fold(x_BNTH: Tensor, k: Tensor) -> Tensor:
    """Queries of one key/value head side by side: [B, K, G*T, H]; [1, K, B*G*T, H] for a page that
    all rows share."""
    rows, heads, tokens, dim = x_BNTH.shape
    kv_heads = k.shape[1]
    x = x_BNTH.reshape(rows, kv_heads, heads // kv_heads * tokens, dim)
    if k.shape[0] != 1 or rows == 1:
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
