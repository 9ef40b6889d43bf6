"""Index scores of a block of queries against a block of keys, and where the blocks lie.

Keys are taken in order of position, a fixed number to a block, and the last block is filled up with
zeros, so every product has the same shape however the keys are cut into pages or dealt over owners,
and a score the same bits: matrix products sum along D alike in each column of whole tiles. An owner
that holds a share of the keys makes that share of the products.

Legend: S queries of a block, H index heads, D index dim, K keys of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span
from longstraw_backend.kernels.staging import staged

from .select import ABSENT

__all__ = ["KeyBlock", "block_scores", "key_block_size", "key_blocks", "query_block_size"]

KEY_BLOCK = 4096
QUERY_ROWS = 2048
"""Rows of one product, queries times heads. With KEY_BLOCK: 32 MiB of float32."""
CPU_TILE = 48
"""Keys to which CPU products are filled up. MKL's AVX2 kernels sum the columns after the last whole
tile (12 of float64, 24 of float32) in another order; seen with one thread and with two."""


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
    """Keys [K, D] in order of position, zeros after the last: ``runs`` says which they are."""

    keys: Tensor
    runs: list[range]

    @property
    def start(self) -> int:
        """Position of the first key."""
        return self.runs[0].start

    @property
    def stop(self) -> int:
        """After the position of the last key."""
        return self.runs[-1].stop

    def positions(self) -> Tensor:
        """[K] int32 on the device of the keys; ``ABSENT`` where there is none."""
        like: Any = dict(dtype=torch.int32, device=self.keys.device)
        there = [torch.arange(run.start, run.stop, **like) for run in self.runs]
        missing = self.keys.shape[0] - sum(map(len, self.runs))
        return torch.cat([*there, torch.full((missing,), ABSENT, **like)])


def key_blocks(spans: Sequence[Span], size: int, device: torch.device) -> Iterator[KeyBlock]:
    """All keys of the spans, ``size`` to a block, on ``device``; valid until the next one.

    A block inside one span is a view if that is there, else copied while the one before is used.
    """
    blocks, same = itertools.tee(_blocks_at_rest(spans, size, device))
    for block, (keys,) in zip(blocks, staged(((b.keys,) for b in same), device), strict=True):
        yield block._replace(keys=keys)


def _blocks_at_rest(spans: Sequence[Span], size: int, device: torch.device) -> Iterator[KeyBlock]:
    for pieces in _cut(spans, size):
        whole = pieces[0].rows
        keys = whole if len(whole) == size else _assemble(pieces, size, device)
        yield KeyBlock(keys, [range(piece.start, piece.stop) for piece in pieces])


def _cut(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Pieces of spans, ``size`` rows together; fewer in the last list."""
    pieces: list[Span] = []
    room = size
    for span in spans:
        while span.rows.shape[0]:
            piece = Span(span.start, span.rows[:room])
            pieces.append(piece)
            room -= piece.rows.shape[0]
            span = Span(piece.stop, span.rows[piece.rows.shape[0] :])
            if room == 0:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _assemble(pieces: Sequence[Span], size: int, device: torch.device) -> Tensor:
    like = pieces[0].rows
    keys = like.new_zeros(size, like.shape[1], device=device)
    filled = 0
    for _, rows in pieces:
        keys[filled : filled + rows.shape[0]] = rows
        filled += rows.shape[0]
    return keys


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return rows @ keys.mT
    filled = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[0] % CPU_TILE))
    return (rows @ filled.mT)[:, : keys.shape[0]]


def block_scores(q_SHD: Tensor, weights_SH: Tensor, keys_KD: Tensor, scale: float) -> Tensor:
    """sum_h w[s,h] relu(scale q[s,h] . k[t]), heads added one by one in order; [S, K].

    NaN becomes the highest score: it is selected and seen downstream, not lost.
    """
    queries, heads, dim = q_SHD.shape
    products = _products(q_SHD.reshape(queries * heads, dim), keys_KD).mul_(scale).relu_()
    products = products.reshape(queries, heads, -1)
    total = products[:, 0] * weights_SH[:, :1]
    for head in range(1, heads):
        total += products[:, head].mul_(weights_SH[:, head, None])
    return total.nan_to_num_(
        nan=float("inf"), posinf=float("inf"), neginf=torch.finfo(total.dtype).min
    )
