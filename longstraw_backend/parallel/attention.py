"""Attention of a block whose tokens, and all keys and values before it, are spread over ranks.

Queries travel, pages stay. With q_r, k_r, v_r those of rank r's run of the block:

    q = gather q_r                       every owner sees all queries of the block
    (o_i, l_i) = attend(q, own pages)    no mask: what is resident lies before the block
    for its own run a rank makes         attend(q_r, k and v of runs before), and causally its own
    and merges                           these and o_i, l_i of every owner, by log-sum-exp

The backward goes the same ways: gradient, merged output and log-sum-exp travel to the owners, dq
comes back and is summed; gradients of pages are added where the pages are, those of new keys and
values return to the rank that made them.

Moved per token of the block and layer, in elements, (R - 1) / R of it between ranks; N query and K
key/value heads of width H:

    forward     N H queries, N (H + 1) outputs and log-sum-exps, 2 K H keys and values
    backward    N H queries, N (2 H + 1) gradients, outputs and log-sum-exps, N H dq,
                4 K H keys and values and their gradients

What is gathered sets out before a rank computes what it needs nothing of others for, causal
attention over its own run and the backward of that, and is waited for after it.

Legend: B rows, R ranks, T tokens of the block, T/R of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Impl, Kept, Page, segment_attention
from longstraw_backend.kernels.segment_attention.api import check_inputs, how_to
from longstraw_backend.kernels.segment_attention.parts import (
    How,
    Merge,
    back_over_own,
    back_over_pages,
    over_own,
    over_pages,
    pages_of,
)
from longstraw_backend.kernels.staging import Staging

from .exchange import Arriving, Ranks, all_to_all, arriving, by_run, summed_run

__all__ = ["owners_attention"]

TOKENS = 2  # dim


def owners_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Sequence[Page],
    ranks: Ranks,
    *,
    resident: bool,
    scale: float,
    impl: Impl | None = None,
    staging: Staging = "segments",
    page_grads: Sequence[Page | None] | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """``segment_attention`` over all ranks' pages; every rank must call it.

    Args:
        q: queries of this rank's run, [B, N, T/R, H]; runs are equally long.
        k: its keys, [B, K, T/R, H].
        v: its values.
        pages: resident tokens that this rank owns, none or any of those before the block.
        resident: whether any rank owns any; the same on all.
        page_grads: see ``segment_attention``.
        kept: spares a recomputation of this call its forward and what that sends; on all ranks or
            on none.

    Returns:
        [B, N, T/R, H] in the dtype of q. Differentiable in q, k and v; gradients of pages come
        through ``page_grads`` alone. Nothing depends on the order in which messages arrive.

    Raises:
        ValueError: see ``segment_attention``; before anything is sent.
    """
    if ranks.size == 1:
        options: Any = dict(scale=scale, impl=impl, staging=staging, page_grads=page_grads)
        return segment_attention(q, k, v, pages, kept=kept, **options)
    check_inputs(q, k, v, pages)
    how = how_to(q, scale, impl, staging)
    grads = [None] * len(pages) if page_grads is None else list(page_grads)
    flat = [t for page in pages for t in page]
    out: Tensor = _OwnersAttention.apply(q, k, v, how, ranks, resident, grads, kept, *flat)
    return out


class _OwnersAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: How,
        ranks: Ranks,
        resident: bool,
        page_grads: Sequence[Page | None],
        kept: Kept | None,
        *flat: Tensor,
    ) -> Tensor:
        def attended() -> tuple[Tensor, Tensor]:
            merged = _attended(q, k, v, pages_of(flat), ranks, how, resident)
            return merged.out.to(q.dtype), merged.lse

        out, lse = attended() if kept is None else kept.once(attended)
        ctx.save_for_backward(q, k, v, out, lse, *flat)
        ctx.how, ctx.ranks, ctx.resident, ctx.page_grads = how, ranks, resident, page_grads
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *flat = ctx.saved_tensors
        ranks: Ranks = ctx.ranks
        dout = dout.contiguous()
        block_kv = _gathering((k, v), ranks)
        queries = _gathering((dout, q, out, lse[..., None]), ranks) if ctx.resident else []
        dq, dk, dv = _back_of_block(dout, q, k, v, out, lse, block_kv, ranks, ctx.how)
        if ctx.resident:
            dout_, q_, out_, lse_ = (x.wait() for x in queries)
            dq_block = torch.zeros(q_.shape, dtype=lse.dtype, device=q.device)
            how, grads = ctx.how, ctx.page_grads
            back_over_pages(dq_block, dout_, q_, out_, lse_[..., 0], pages_of(flat), grads, how)
            dq += summed_run(dq_block, ranks, TOKENS)
        return (dq.to(q.dtype), dk, dv, *([None] * (5 + len(flat))))


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Sequence[Page],
    ranks: Ranks,
    how: How,
    resident: bool,
) -> Merge:
    """Of this rank's run, from all keys and values wherever they are."""
    block_kv = _gathering((k, v), ranks)
    block_q = _gathering((q,), ranks) if resident else []
    merged = Merge(*over_own(q, k, v, how))
    over_pages(merged, q, _runs_before(block_kv, k, ranks), how)
    for arrived in block_q:
        parts = _of_owners(arrived.wait(), pages, ranks, how)
        for part in zip(*parts, strict=True):
            merged.add(*part)
    return merged


def _gathering(parts: Sequence[Tensor], ranks: Ranks) -> list[Arriving]:
    """Tensors of all ranks' runs, on their way to be side by side."""
    return [arriving(x, ranks, TOKENS) for x in parts]


def _runs_before(block_kv: Sequence[Arriving], k: Tensor, ranks: Ranks) -> list[Page]:
    """Keys and values of the block's runs before this rank's, as one page; all ranks gather."""
    stop = ranks.rank * k.shape[TOKENS]
    before = [x.wait()[:, :, :stop] for x in block_kv]
    return [Page(*before)] if stop else []


def _of_owners(block: Tensor, pages: Sequence[Page], ranks: Ranks, how: How) -> list[Tensor]:
    """Outputs and log-sum-exps of this run's queries over each owner's pages, [R, ...], from the
    whole block's queries."""
    merged = over_pages(None, block, pages, how)
    if merged is None:
        wide = torch.promote_types(block.dtype, torch.float32)
        nothing = torch.full(block.shape[:3], float("-inf"), dtype=wide, device=block.device)
        merged = Merge(torch.zeros_like(block), nothing)
    parts = merged.out.to(block.dtype), merged.lse
    return [all_to_all(by_run(x, ranks, TOKENS), ranks) for x in parts]


def _back_of_block(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_kv: Sequence[Arriving],
    ranks: Ranks,
    how: How,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq of the block's own keys, wide, and dk and dv of this rank's, from all ranks' queries."""
    dq, *own = back_over_own(dout, q, k, v, out, lse, how)
    before = _runs_before(block_kv, k, ranks)
    start, length = ranks.rank * k.shape[TOKENS], k.shape[TOKENS]
    shape = (*k.shape[:2], ranks.size * length, k.shape[3])
    sums = Page(*(torch.zeros(shape, dtype=lse.dtype, device=q.device) for _ in range(2)))
    given = [Page(*(x[:, :, :start] for x in sums))] if before else []
    back_over_pages(dq, dout, q, out, lse, before, given, how)
    for total, part in zip(sums, own, strict=True):
        total[:, :, start : start + length] += part
    dk, dv = (summed_run(x, ranks, TOKENS).to(k.dtype) for x in sums)
    return dq, dk, dv
