"""The indexer's selection when the ranks that share a prompt own the index keys by position.

Queries travel to the keys: every owner scores the whole block's queries against the keys it holds,
its run of the block included, and its candidates travel to the rank of each query. The
order is that of one rank: higher score first, ties by lower position. Nothing is differentiable.

Moved per token of the block and layer between all ranks, in bytes, with R ranks, H index heads of
dim D in e bytes, head weights in w and scores in s bytes (4, or 8 for float64):

    (R - 1) (H (D e + w) + k (s + 4))

Legend: R ranks, T tokens of the block, S = T / R those of this rank, H index heads, D index dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw_backend.kernels.index_topk import (
    Candidates,
    index_candidates,
    index_topk,
    merge_candidates,
)
from longstraw_backend.kernels.spans import Span, check_spans, spans_of_runs

from .exchange import Ranks, all_to_all, gather_tokens

__all__ = ["owners_topk"]


@torch.no_grad()
def owners_topk(
    q_SHD: Tensor,
    weights_SH: Tensor,
    keys_SD: Tensor,
    pages: Sequence[Tensor],
    ranks: Ranks,
    *,
    runs: Sequence[range],
    start: int,
    k: int,
    scale: float,
) -> Tensor:
    """``index_topk`` of a block whose tokens and resident keys are dealt over ranks.

    Every rank calls it with the same ``start``, ``k``, ``scale`` and S.

    Args:
        q_SHD: index queries of this rank's tokens, which begin at ``start`` + rank * S.
        weights_SH: their head weights.
        keys_SD: their index keys.
        pages: keys of the resident tokens that this rank owns, [T_i, D] each; none is fine.
        runs: their positions, ascending, all before ``start``.
        start: absolute position of the block's first token.
        k: tokens to select, of all ranks' together.

    Returns:
        Absolute positions [S, k] int32 for this rank's tokens, bitwise those of one rank. Tokens
        that pad the block at its end select like others, and no token before selects them.

    Raises:
        ValueError: a shape, dtype, device or position does not fit; the text says which.
    """
    held = spans_of_runs(pages, runs)
    if ranks.size == 1:
        return index_topk(q_SHD, weights_SH, keys_SD, held, start=start, k=k, scale=scale)
    check_spans("pages", held, keys_SD, start)
    own = Span(start + ranks.rank * keys_SD.shape[0], keys_SD)
    q, weights = (gather_tokens(x, ranks, 0) for x in (q_SHD, weights_SH))
    best = index_candidates(q, weights, [*held, own], start=start, k=k, scale=scale)
    return merge_candidates(_to_their_queries(best.padded(k), ranks), k)


def _to_their_queries(candidates: Candidates, ranks: Ranks) -> list[Candidates]:
    """This owner's for all queries [T, k] -> every owner's for this rank's queries, R x [S, k]."""
    scores, positions = (all_to_all(x.unflatten(0, (ranks.size, -1)), ranks) for x in candidates)
    return [Candidates(*part) for part in zip(scores, positions, strict=True)]
