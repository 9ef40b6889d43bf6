"""A gated-delta-net layer over ranks that share a block, each with a run of its tokens.

For more ranks than heads can be dealt to. What a run of tokens does to the state is affine,
S' = M S + U: every rank runs the rule from zeros (U) and, without values, from the identity (M),
all ranks gather the pairs, and each chains them from the state before the block. The rule then runs
once more, from the state at the start of the run. That makes three passes of the rule over T / R
tokens; the convolution needs the last columns of the runs before, which are gathered too.

Every rank keeps the whole state, and the same bits of it. Cotangents of a state are partial sums:
what the ranks hold for it adds up to its cotangent.

Bytes received by all ranks together, per token, layer and pass (a backward is another pass), for B
rows and ``e`` bytes an element of the columns; 4 is 8 for float64:

    R (R - 1) / T (4 N K (K + V) + e C (W - 1))

Legend: B rows, T tokens of the block, R ranks, C convolution channels, W width of the convolution,
N value heads, K and V head dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_backend.kernels.delta_rule import gated_delta_rule
from longstraw_backend.parallel.exchange import Ranks, gather_tokens
from longstraw_backend.state import Recurrent

from .delta_by_head import check_block
from .delta_heads import DeltaHeads

__all__ = ["run_by_position"]


def run_by_position(
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

    Differentiable in the tokens, the state before and the weights; of the last two a rank's
    gradient is a partial sum. Every rank must call it, and go backward through its output, in the
    same order.

    Args:
        heads: all of the layer.
        x_run: columns before the convolution, [B, T / R, C].
        b_run, a_run: logits of writing strength and decay, [B, T / R, N].
        before: state of all heads, the same on every rank.
        real: how many of the block's tokens are real. The rest are padding at its end: their
            outputs mean nothing, and they leave nothing in the state.
        final_state: whether the state after the last real token is wanted.

    Returns:
        Outputs of the run, [B, T / R, N, V], and the state after the block, on every rank.

    Raises:
        ValueError: the block has no real token or fewer tokens than real ones, or the state is not
            that of the heads.
    """
    check_block(heads, x_run, before, ranks, real)
    counts = _real_tokens(x_run.shape[1], ranks.size, real)
    columns, conv = _with_columns_before(x_run.mT, before.conv, counts, ranks)
    q, k, v = heads.mixed(columns)
    padding = torch.arange(x_run.shape[1], device=x_run.device)[:, None] >= counts[ranks.rank]
    decay = heads.decay(a_run).masked_fill(padding, 0)
    rule = decay, b_run.sigmoid().masked_fill(padding, 0)
    states = _chained(before.recurrent, *_change(k, v, *rule), ranks)
    out, _ = gated_delta_rule(q, k, v, *rule, states[ranks.rank], final_state=False)
    return out, Recurrent(conv, states[-1].clone()) if final_state else None


def _real_tokens(run: int, size: int, real: int) -> list[int]:
    """How many each rank has."""
    return [min(max(real - rank * run, 0), run) for rank in range(size)]


def _with_columns_before(
    x_BCS: Tensor, before_BCW: Tensor, counts: list[int], ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """This rank's columns with the W - 1 before them, and the last W - 1 real ones of the block."""
    width = before_BCW.shape[2]
    reach = min(width, x_BCS.shape[2])
    mine = counts[ranks.rank]
    tail = F.pad(x_BCS[:, :, max(mine - reach, 0) : mine], (max(reach - mine, 0), 0))
    kept = [min(n, reach) for n in counts]
    tails = gather_tokens(tail[None], ranks, 0)
    real = [x[:, :, reach - n :] for x, n in zip(tails, kept, strict=True)]
    # one tensor for all ranks, so that the backward of the gathering runs on each
    history = torch.cat([before_BCW, *real], dim=2)
    start = sum(kept[: ranks.rank])
    columns = torch.cat([history[:, :, start : start + width], x_BCS], dim=2)
    return columns, history[:, :, history.shape[2] - width :].clone()


def _change(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """M [B, N, K, K] and U [B, N, K, V]: tokens take a state S to M S + U."""
    wide = torch.promote_types(k.dtype, torch.float32)
    rows, _, heads, value_dim = v.shape
    dim = k.shape[-1]
    zeros = k.new_zeros(rows, heads, dim, value_dim, dtype=wide)
    one = torch.eye(dim, dtype=wide, device=k.device).expand(rows, heads, -1, -1)
    no_values = v.new_zeros(*v.shape[:3], dim)
    _, added = gated_delta_rule(k, k, v, decay, beta, zeros)
    _, carried = gated_delta_rule(k, k, no_values, decay, beta, one)
    assert added is not None and carried is not None
    return carried, added


def _chained(state_BNKV: Tensor, carried: Tensor, added: Tensor, ranks: Ranks) -> Tensor:
    """States before each rank's tokens and after the last's, [R + 1, B, N, K, V]."""
    pairs = gather_tokens(torch.cat([carried, added], dim=-1)[None], ranks, 0)
    states = [state_BNKV]
    with torch.autocast(state_BNKV.device.type, enabled=False):
        for pair in pairs:
            m, u = pair.split([carried.shape[-1], added.shape[-1]], dim=-1)
            states.append(m @ states[-1] + u)
    return torch.stack(states)
