"""Sparse latent attention when the ranks that share a prompt own the latents by position.

Queries and selections travel to the latents: every owner attends, for the whole block's queries,
to those selected tokens that it holds, its share of the block's own included. Outputs and their
log-sum-exp travel to the rank of each query, which merges them in order of rank. Latents and their
gradients never move: resident ones have theirs in ``page_grads``, the block's at their own rank.

Moved per token and layer, with R ranks, N heads, C and V in e bytes, log-sum-exp in s bytes (4, or
8 for float64), K selected tokens:

    forward (R - 1) (N (C e + V e + s) + 4 K)        backward (R - 1) N (C e + V e + s)

Legend: R ranks, T tokens of the block, S = T / R those of this rank, N heads, C latent and RoPE
width, V latent width, K selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span, check_spans
from longstraw_backend.kernels.sparse_mla import LatentAttention, sparse_mla, sparse_mla_part

from .exchange import Ranks, gather_tokens, swap

__all__ = ["held_selection", "merge_parts", "owned_sparse_mla"]


def owned_sparse_mla(
    q_SNC: Tensor,
    latents_SC: Tensor,
    selection_SK: Tensor,
    pages: Sequence[Span],
    *,
    ranks: Ranks,
    start: int,
    scale: float,
    value_dim: int,
    page_grads: Sequence[Tensor | None] | None = None,
) -> LatentAttention:
    """``sparse_mla`` of a block whose tokens and resident latents are dealt over ranks.

    Every rank calls it with the same ``start``, ``scale``, ``value_dim``, S and K, and takes part
    in the backward if one does, also where its tokens are padding.

    Args:
        q_SNC: absorbed queries of this rank's tokens, which begin at ``start`` + rank * S.
        latents_SC: their latents and rotated keys.
        selection_SK: absolute positions selected for them, whoever holds them; -1 is no token.
        pages: latents of the resident tokens that this rank owns; none is fine.
        start: absolute position of the block's first token.
        page_grads: for each of ``pages``, as for ``sparse_mla``: from all ranks' queries.

    Returns:
        Out [S, N, V] and log-sum-exp [S, N] of this rank's tokens; 0 and -inf for a query without
        any token. Both are differentiable in q and in latents, of all ranks.

    Raises:
        ValueError: a shape, dtype, device or position does not fit; the text says which.
    """
    how: dict[str, Any] = dict(scale=scale, value_dim=value_dim, page_grads=page_grads)
    if ranks.size == 1:
        return sparse_mla(q_SNC, latents_SC, selection_SK, pages, start=start, **how)
    check_spans("pages", pages, latents_SC, start)
    own = Span(start + ranks.rank * latents_SC.shape[0], latents_SC)
    q, selection = (gather_tokens(x, ranks, 0) for x in (q_SNC, selection_SK))
    held = held_selection(selection, [*pages, own])
    part = sparse_mla_part(q, own, held, pages, **how)
    return merge_parts(*(swap(x.unflatten(0, (ranks.size, -1)), ranks) for x in part))


def held_selection(selection_SK: Tensor, spans: Sequence[Span]) -> Tensor:
    """Those selected positions that spans hold, in order at the left, then -1: [S, K' <= K].

    An owner's attention then costs what it holds of the selection, not all of it.

    Args:
        spans: in order of position, at least one.
    """
    ends = [[s.start for s in spans], [s.stop for s in spans]]
    starts, stops = torch.tensor(ends, dtype=selection_SK.dtype, device=selection_SK.device)
    span = torch.bucketize(selection_SK, starts, right=True) - 1
    held = (span >= 0) & (selection_SK < stops[span.clamp_min(0)])
    width = max(1, int(held.sum(1).max()))
    order = held.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    return selection_SK.masked_fill(~held, -1).gather(1, order)


def merge_parts(out_RSNV: Tensor, lse_RSN: Tensor) -> LatentAttention:
    """Attention over R disjoint parts of the tokens, from that over each.

        l = logsumexp_r l_r,    o = sum_r exp(l_r - l) o_r

    in the dtype of the log-sum-exp and in order of r. A part without tokens has l_r = -inf and
    counts nothing; without any, o = 0 and l = -inf. Differentiable in both.

    Returns:
        Out [S, N, V] in the dtype of the parts, and log-sum-exp [S, N].
    """
    return LatentAttention(*_Merge.apply(out_RSNV, lse_RSN))


class _Merge(torch.autograd.Function):
    """With p_r = exp(l_r - l): do_r = p_r do, dl_r = p_r (do . (o_r - o) + dl)."""

    @staticmethod
    def forward(ctx: Any, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        lse = lses.logsumexp(0)
        shares = (lses - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
        out = torch.zeros_like(outs[0], dtype=lse.dtype)
        for part, share in zip(outs, shares, strict=True):
            out += part * share[..., None]
        ctx.save_for_backward(outs, shares, out)
        return out.to(outs.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
        outs, shares, out = ctx.saved_tensors
        dout = dout.to(out.dtype)
        along = [(dout * (part - out)).sum(-1) for part in outs]
        douts = torch.stack([(dout * share[..., None]).to(outs.dtype) for share in shares])
        return douts, shares * (torch.stack(along) + dlse)
