"""Index scores of a block of queries against a block of keys, and where the blocks lie.

Key blocks lie at absolute multiples of their size and are filled up with zeros, so every product
has the same shape however the keys are cut into pages, and a score the same bits.

Legend: S queries of a block, H index heads, D index dim, K keys of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span
from longstraw_backend.kernels.staging import staged

__all__ = ["KeyBlock", "block_scores", "key_block_size", "key_blocks", "query_block_size"]

KEY_BLOCK = 4096
QUERY_ROWS = 2048
"""Rows of one product, queries times heads. With KEY_BLOCK: 32 MiB of float32."""


def key_block_size(stop: int) -> int:
    """Keys of a block when positions run to ``stop``: all of them, rounded up, if they are few."""
    size = 64
    while size < min(stop, KEY_BLOCK):
        size *= 2
    return min(size, KEY_BLOCK)


def query_block_size(heads: int) -> int:
    """Queries of a block."""
    return max(1, QUERY_ROWS // heads)


class KeyBlock(NamedTuple):
    """Keys [K, D] at positions [start, start + K); ``held`` [K] bool or None if all are there."""

    start: int
    keys: Tensor
    held: Tensor | None


def key_blocks(
    spans: Sequence[Span], size: int, stop: int, device: torch.device
) -> Iterator[KeyBlock]:
    """Blocks with at least one key before ``stop``, on ``device``; valid until the next one.

    A block inside one span is a view if that is there, else copied while the one before is used.
    """
    blocks, same = itertools.tee(_blocks_at_rest(spans, size, stop, device))
    for block, (keys,) in zip(blocks, staged(((b.keys,) for b in same), device), strict=True):
        yield block._replace(keys=keys)


def _blocks_at_rest(
    spans: Sequence[Span], size: int, stop: int, device: torch.device
) -> Iterator[KeyBlock]:
    for start in range(0, stop, size):
        inside = [s for s in spans if s.start < start + size and s.stop > start and s.start < stop]
        if not inside:
            continue
        first = inside[0]
        if first.start <= start and first.stop >= start + size:
            offset = start - first.start
            yield KeyBlock(start, first.rows[offset : offset + size], None)
        else:
            yield _assemble(inside, start, size, device)


def _assemble(spans: Sequence[Span], start: int, size: int, device: torch.device) -> KeyBlock:
    like = spans[0].rows
    keys = like.new_zeros(size, like.shape[1], device=device)
    held = torch.zeros(size, dtype=torch.bool, device=device)
    for span in spans:
        low, high = max(span.start, start), min(span.stop, start + size)
        keys[low - start : high - start] = span.rows[low - span.start : high - span.start]
        held[low - start : high - start] = True
    return KeyBlock(start, keys, held)


def block_scores(q_SHD: Tensor, weights_SH: Tensor, keys_KD: Tensor, scale: float) -> Tensor:
    """sum_h w[s,h] relu(scale q[s,h] . k[t]), heads added one by one in order; [S, K].

    NaN becomes the highest score: it is selected and seen downstream, not lost.
    """
    queries, heads, dim = q_SHD.shape
    products = (q_SHD.reshape(queries * heads, dim) @ keys_KD.mT).mul_(scale).relu_()
    products = products.reshape(queries, heads, -1)
    total = products[:, 0] * weights_SH[:, :1]
    for head in range(1, heads):
        total += products[:, head].mul_(weights_SH[:, head, None])
    return total.nan_to_num_(
        nan=float("inf"), posinf=float("inf"), neginf=torch.finfo(total.dtype).min
    )
