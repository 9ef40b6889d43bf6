"""Latent attention when the ranks that share a prompt own the latents by position.

Sparse: queries and selections travel to the latents. Every owner attends, for the whole block's
queries, to those selected tokens that it holds, its run of the block included; outputs and their
log-sum-exp travel to the rank of each query, which merges them in order of rank. Latents and their
gradients never move: resident ones have theirs in ``page_grads``, the block's at their own rank.

Moved per token of the block and layer between all ranks, in bytes, with R ranks, N heads, C and V
in e bytes, log-sum-exp in s bytes (4, or 8 for float64), K selected tokens:

    forward (R - 1) (N (C e + V e + s) + 4 K)        backward (R - 1) N (C e + V e + s)

Dense: attention over owners with the latent as key and value.

Legend: R ranks, T tokens of the block, S = T / R those of this rank, N heads, C latent and RoPE
width, V latent width, K selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Kept
from longstraw_backend.kernels.spans import Span, check_spans, consecutive, spans_of_runs
from longstraw_backend.kernels.sparse_mla import (
    LatentAttention,
    dense_mla,
    sparse_mla,
    sparse_mla_part,
)

from .attention import owners_attention
from .exchange import Ranks, gather_tokens, swap

__all__ = ["merge_parts", "owners_dense_mla", "owners_sparse_mla", "rows_selected"]


def owners_sparse_mla(
    q_SNC: Tensor,
    latents_SC: Tensor,
    selection_SK: Tensor,
    pages: Sequence[Tensor],
    ranks: Ranks,
    *,
    runs: Sequence[range],
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
        pages: latents of the resident tokens that this rank owns, [T_i, C] each; none is fine.
        runs: their positions, ascending, all before ``start``; of a single rank, [0, ``start``).
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
        resident = consecutive(pages)
        return sparse_mla(q_SNC, latents_SC, selection_SK, resident, start=start, **how)
    check_spans("pages", spans_of_runs(pages, runs), latents_SC, start)
    q, selection = (gather_tokens(x, ranks, 0) for x in (q_SNC, selection_SK))
    length, tokens = latents_SC.shape[0], sum(map(len, runs))
    first = start + ranks.rank * length
    rows = rows_selected(selection, [*runs, range(first, first + length)])
    part = sparse_mla_part(q, Span(tokens, latents_SC), rows, consecutive(pages), **how)
    return merge_parts(*(swap(x.unflatten(0, (ranks.size, -1)), ranks) for x in part))


def owners_dense_mla(
    q_BSNC: Tensor,
    latents_BSC: Tensor,
    pages: Sequence[Tensor],
    ranks: Ranks,
    *,
    resident: bool,
    scale: float,
    value_dim: int,
    page_grads: Sequence[Tensor | None] | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """``dense_mla`` of a block whose tokens and resident latents are dealt over ranks.

    It is ``owners_attention`` of N query heads and one key/value head of width C; see there for
    what is moved.

    Args:
        q_BSNC: absorbed queries of this rank's tokens.
        latents_BSC: their latents and rotated keys.
        pages: of the resident tokens that this rank owns, [1 or B, T_i, C] each; none is fine.
        resident: whether any rank owns any; the same on all.
        kept: see ``owners_attention``.

    Returns:
        [B, S, N, V] of this rank's tokens, differentiable as for ``dense_mla``.
    """
    attention = partial(owners_attention, ranks=ranks, resident=resident, kept=kept)
    how: dict[str, Any] = dict(scale=scale, value_dim=value_dim, page_grads=page_grads)
    return dense_mla(q_BSNC, latents_BSC, pages, attention=attention, **how)


def rows_selected(selection_SK: Tensor, runs: Sequence[range]) -> Tensor:
    """Which of an owner's rows are selected: [S, K' <= K], ascending, then -1.

    An owner's attention then costs what it holds of the selection, not all of it, and does not
    depend on the number of runs.

    Args:
        selection_SK: absolute positions, -1 is no token.
        runs: positions of the owner's rows, ascending, at least one.
    """
    ends = [[r.start for r in runs], [r.stop for r in runs], [0, *accumulate(map(len, runs))][:-1]]
    like: Any = dict(dtype=selection_SK.dtype, device=selection_SK.device)
    starts, stops, rows = torch.tensor(ends, **like)
    run = (torch.bucketize(selection_SK, starts, right=True) - 1).clamp_min_(0)
    held = (selection_SK >= starts[run]) & (selection_SK < stops[run])
    width = max(1, int(held.sum(1).max()))
    none = torch.iinfo(selection_SK.dtype).max
    found = (selection_SK - starts[run] + rows[run]).masked_fill_(~held, none)
    left: Tensor = found.sort(dim=1).values[:, :width]
    return left.masked_fill(left == none, -1)


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
