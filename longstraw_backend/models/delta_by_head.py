"""A gated-delta-net layer over ranks that share a block, each the owner of some heads.

Every rank has a run of the block's tokens, with all heads. Before the convolution one all-to-all
turns that into all tokens with some heads; another one after the rule turns it back. In between a
rank is alone, with the state of its own heads, and computes what one rank would for these heads.

Bytes sent by all ranks together, per token, layer and pass (a backward is another pass), at ``e``
bytes an element:

    e (R - 1) / R (C + 2 N + N V)

where, with more ranks than key heads, each key head goes to all R / M ranks that it serves and is
counted as often in C. State of a rank: e c (W - 1) + 4 N / R K V bytes a layer (8 for float64).

Legend: B rows, T tokens of the block, R ranks, C convolution channels (c those of a rank), W width
of the convolution, M key heads, N value heads, K and V their dims.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_backend.parallel.exchange import Ranks, swap
from longstraw_backend.state import Recurrent

from .delta_heads import DeltaHeads

__all__ = [
    "can_share",
    "can_share_heads",
    "check_block",
    "deal_channels",
    "deal_heads",
    "own_heads",
    "run_by_head",
]


def run_by_head(
    heads: DeltaHeads,
    x_run: Tensor,
    b_run: Tensor,
    a_run: Tensor,
    before: Recurrent,
    ranks: Ranks,
    real: int,
    *,
    final_state: bool = True,
) -> tuple[Tensor, Recurrent | None]:
    """:meth:`DeltaHeads.run` of a block of which this rank has a run of T / R tokens.

    Differentiable in the tokens, the state before and the weights. The gradient of a weight is that
    of this rank's heads; the caller sums over ranks. Every rank must call it, and go backward
    through its output, in the same order.

    Args:
        heads: all of the layer.
        x_run: columns before the convolution, [B, T / R, C].
        b_run, a_run: logits of writing strength and decay, [B, T / R, N], in the dtype of x_run.
        before: state of this rank's own heads: [B, c, W - 1] and [B, N / R, K, V].
        real: how many of the block's tokens are real. The rest are padding at its end: their
            outputs are zeros, and they leave nothing in the state.
        final_state: whether the state after the last real token is wanted.

    Returns:
        Outputs of the run, [B, T / R, N, V], and the state of the rank's own heads after the block.

    Raises:
        ValueError: heads can't be shared by so many ranks, the block has no real token or fewer
            tokens than real ones, or the state is not that of the rank's heads.
    """
    own = own_heads(heads, ranks)
    check_block(own, x_run, before, ranks, real)
    parts = torch.cat(
        [
            deal_channels(heads, x_run, ranks.size),
            deal_heads(b_run, ranks.size),
            deal_heads(a_run, ranks.size),
        ],
        dim=-1,
    )
    tokens = swap(parts, ranks).movedim(0, 1).flatten(1, 2)[:, :real]
    x, b, a = tokens.split([own.conv_weight.shape[0], own.value_heads, own.value_heads], dim=-1)
    out, after = own.run(x, b, a, before, final_state=final_state)
    return _as_runs(out, x_run.shape[1], ranks), after


def own_heads(heads: DeltaHeads, ranks: Ranks) -> DeltaHeads:
    """This rank's heads; gradients reach the weights of the layer.

    Raises:
        ValueError: the ranks divide neither the key heads, nor the value heads of each.
    """
    size, rank, bias = ranks.size, ranks.rank, heads.conv_bias
    weight = deal_channels(heads, heads.conv_weight.movedim(0, -1), size)[rank]
    return replace(
        heads,
        conv_weight=weight.movedim(-1, 0),
        conv_bias=None if bias is None else deal_channels(heads, bias, size)[rank],
        A_log=deal_heads(heads.A_log, size)[rank],
        dt_bias=deal_heads(heads.dt_bias, size)[rank],
        key_heads=heads.key_heads * _copies(heads, size) // size,
    )


def deal_channels(heads: DeltaHeads, x_C: Tensor, size: int) -> Tensor:
    """Each rank's channels, [R, ..., c], of [..., C]; a key head goes to all ranks it serves."""
    copies = _copies(heads, size)
    q, k, v = heads.split(x_C)
    if copies > 1:
        q, k = (
            x.unflatten(-1, (heads.key_heads, -1)).repeat_interleave(copies, dim=-2).flatten(-2)
            for x in (q, k)
        )
    return torch.cat([deal_heads(x, size) for x in (q, k, v)], dim=-1)


def deal_heads(x_N: Tensor, size: int) -> Tensor:
    """Neighbours in the last dim to each rank: [R, ..., N / R] of [..., N]."""
    dealt: Tensor = x_N.unflatten(-1, (size, -1)).movedim(-2, 0)
    return dealt


def check_block(
    heads: DeltaHeads, x_run: Tensor, before: Recurrent, ranks: Ranks, real: int
) -> None:
    """Raise ValueError unless the block has so many tokens and ``before`` is of the heads."""
    tokens = x_run.shape[1] * ranks.size
    if not 1 <= real <= tokens:
        raise ValueError(f"real: expected 1 to {tokens}, the tokens of the block, got {real}")
    for name, x, like in zip(before._fields, before, heads.nothing(x_run), strict=True):
        if x.shape != like.shape:
            raise ValueError(
                f"before.{name}: expected {list(like.shape)} for this rank's heads, "
                f"got {list(x.shape)}"
            )


def can_share_heads(heads: DeltaHeads, size: int) -> bool:
    """Whether so many ranks can own the heads; else each must own a run of tokens."""
    return can_share(heads.key_heads, heads.value_heads, size)


def can_share(key_heads: int, value_heads: int, size: int) -> bool:
    """:func:`can_share_heads` for so many heads."""
    return key_heads % size == 0 or (size % key_heads == 0 and value_heads % size == 0)


def _copies(heads: DeltaHeads, size: int) -> int:
    """On how many ranks a key head is."""
    keys, values = heads.key_heads, heads.value_heads
    if not can_share_heads(heads, size):
        raise ValueError(
            f"ranks: expected a divisor of {keys} key heads, or a multiple of them that divides "
            f"{values} value heads, got {size}; use fewer ranks, or run_by_position"
        )
    return 1 if keys % size == 0 else size // keys


def _as_runs(out_BTNV: Tensor, run: int, ranks: Ranks) -> Tensor:
    """All heads of this rank's run, [B, T / R, N, V], from some heads of the real tokens."""
    padding = run * ranks.size - out_BTNV.shape[1]
    padded = F.pad(out_BTNV, (0, 0, 0, 0, 0, padding))
    parts = padded.unflatten(1, (ranks.size, run)).movedim(1, 0)
    return swap(parts, ranks).movedim(0, 2).flatten(2, 3)
