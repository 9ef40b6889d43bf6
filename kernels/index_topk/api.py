"""The indexer's selection: which k earlier tokens each new token attends to.

Legend: S new tokens, T all tokens up to the last new one, H index heads, D index dim.

    score[s, t] = sum_h w[s, h] * relu(scale * q[s, h] . key[t])          t <= position of s
    selection[s] = positions of the k highest scores, ties by lower position

(DeepSeek-V3.2 report, arXiv 2512.02556, section 2.1.) Scores are float32, or float64 for float64
inputs. They are made for a block of queries and a block of keys at a time and folded into a running
top-k, so memory does not grow with T; the selection does not depend, in any bit, on how the keys
are cut into pages. Each block of keys meets all queries before the next, so keys in CPU memory come
to the device once, block by block. Nothing here is differentiable: the selection is a constant of
the graph.

Keys may be dealt over owners: each calls :func:`index_candidates` on the keys it holds, and
:func:`merge_candidates` of all candidates is the global selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span, check_spans

from .scores import KeyBlock, block_scores, key_block_size, key_blocks, query_block_size
from .select import ABSENT, Candidates, keep_best

__all__ = ["index_candidates", "index_topk"]


def index_topk(
    q_SHD: Tensor,
    weights_SH: Tensor,
    keys_SD: Tensor,
    pages: Sequence[Span],
    *,
    start: int,
    k: int,
    scale: float,
) -> Tensor:
    """Select k of the resident tokens and of the new tokens up to the query, for each new token.

    Args:
        q_SHD: index queries after RoPE, [S, H, D].
        weights_SH: head weights, of any sign, [S, H] in any floating dtype.
        keys_SD: index keys of the new tokens, [S, D].
        pages: index keys of resident tokens, all before ``start``, on the device of q or in CPU
            memory.
        start: absolute position of the first new token.
        k: tokens to select.
        scale: factor on the products, D^-0.5 in the models.

    Returns:
        Absolute positions [S, k] int32, ascending; -1 fills rows with fewer than k tokens. No
        gradient.

    Raises:
        ValueError: a shape, dtype, device or position does not fit; the text says which.
    """
    _check(q_SHD, weights_SH, keys_SD, k)
    check_spans("pages", pages, keys_SD, start)
    spans = [*pages, Span(start, keys_SD)]
    return index_candidates(q_SHD, weights_SH, spans, start=start, k=k, scale=scale).selection(k)


@torch.no_grad()
def index_candidates(
    q_SHD: Tensor,
    weights_SH: Tensor,
    spans: Sequence[Span],
    *,
    start: int,
    k: int,
    scale: float,
) -> Candidates:
    """The best k (fewer, if there are fewer) for each query among the keys in ``spans``.

    Args:
        spans: keys in order of position, the new tokens' own included; on one of several owners,
            any part of them, also none.

    Returns:
        Candidates [S, K], K <= k, for :func:`merge_candidates`. No gradient.
    """
    device, stop = q_SHD.device, start + q_SHD.shape[0]
    queries = _query_blocks(q_SHD, weights_SH, start)
    best = [_no_candidates(block) for block in queries]
    with torch.autocast(device.type, enabled=False):  # scores are wide, whatever the caller's
        for keys in key_blocks(spans, key_block_size(stop), device):
            positions = keys.positions()
            for i, block in enumerate(queries):
                if keys.start < block.stop:
                    best[i] = _with_keys(best[i], block, keys, positions, k, scale)
    width = max(b.scores.shape[1] for b in best)
    padded = [b.padded(width) for b in best]
    return Candidates(*(torch.cat(parts) for parts in zip(*padded, strict=True)))


class _QueryBlock(NamedTuple):
    """Queries [S, H, D] at positions [start, stop) and their head weights [S, H]."""

    start: int
    stop: int
    q: Tensor
    weights: Tensor


def _query_blocks(q: Tensor, weights: Tensor, start: int) -> list[_QueryBlock]:
    blocks, size = [], query_block_size(q.shape[1])
    for part, w in zip(q.split(size), weights.split(size), strict=True):
        blocks.append(_QueryBlock(start, start + part.shape[0], part, w))
        start += part.shape[0]
    return blocks


def _no_candidates(block: _QueryBlock) -> Candidates:
    q = block.q
    scores = q.new_empty(q.shape[0], 0, dtype=torch.promote_types(q.dtype, torch.float32))
    return Candidates(scores, scores.new_empty(scores.shape, dtype=torch.int32))


def _with_keys(
    best: Candidates,
    queries: _QueryBlock,
    block: KeyBlock,
    positions: Tensor,
    k: int,
    scale: float,
) -> Candidates:
    """The best k of those so far and of the keys of one more block, which lies after theirs."""
    q, w, keys = (x.to(best.scores.dtype) for x in (queries.q, queries.weights, block.keys))
    scores = block_scores(q, w, keys, scale)
    if block.stop - 1 > queries.start:
        own = torch.arange(queries.start, queries.stop, dtype=torch.int32, device=q.device)
        scores.masked_fill_(positions > own[:, None], float("-inf"))
    scores.masked_fill_(positions == ABSENT, float("-inf"))
    both = Candidates(
        torch.cat([best.scores, scores], dim=1),
        torch.cat([best.positions, positions.expand_as(scores)], dim=1),
    )
    return keep_best(both, k)


def _check(q: Tensor, weights: Tensor, keys: Tensor, k: int) -> None:
    if q.dim() != 3 or 0 in q.shape:
        raise ValueError(f"q: expected [S, H, D] with S, H, D >= 1, got {tuple(q.shape)}")
    tokens, heads, dim = q.shape
    if tuple(weights.shape) != (tokens, heads):
        raise ValueError(f"weights: expected [{tokens}, {heads}], got {tuple(weights.shape)}")
    if tuple(keys.shape) != (tokens, dim):
        raise ValueError(f"keys: expected [{tokens}, {dim}], got {tuple(keys.shape)}")
    if keys.dtype != q.dtype or any(t.device != q.device for t in (weights, keys)):
        raise ValueError(
            f"keys, weights: expected keys of {q.dtype} and both on {q.device}, got {keys.dtype} "
            f"on {keys.device} and weights on {weights.device}"
        )
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
