"""What ranks that share a prompt exchange, with its gradient.

A block of T tokens is cut into ``size`` equal runs; rank r has run r (the caller pads the block).
Each operation is its own inverse's backward: what was gathered is summed back to its owners, what
was dealt out is collected again. Sums are made in order of rank: every repetition gives the same
bits.

Legend: R ranks, T tokens of the block, T/R those of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "all_gathered", "all_to_all", "gather_tokens", "swap"]


@dataclass(frozen=True)
class Ranks:
    """This rank's place among those that share a prompt.

    Attributes:
        group: None if it is alone.
        rank: within the group.
        size: of the group.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a group."""
        if group is None or dist.get_world_size(group) == 1:
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


def all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Part s of every rank r, [R, ...], goes to rank s, as its part r. Without gradient."""
    if ranks.group is None:
        return parts
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received


def swap(parts: Tensor, ranks: Ranks) -> Tensor:
    """:func:`all_to_all` with its gradient, which is another one."""
    out: Tensor = _Swap.apply(parts, ranks)
    return out


def gather_tokens(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """All ranks' tokens, in order, along ``dim``; the gradient is summed over ranks."""
    out: Tensor = _GatherTokens.apply(x, ranks, dim)
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_to_all(parts, ranks)

    @staticmethod
    def backward(ctx: Any, dparts: Tensor) -> tuple[Tensor, None]:
        return all_to_all(dparts, ctx.ranks), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return torch.cat(list(all_gathered(x, ranks)), dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        parts = torch.stack(dx.chunk(ctx.ranks.size, ctx.dim))
        return all_to_all(parts, ctx.ranks).sum(0), None, None


def all_gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """Every rank's ``x``, [R, ...]. Without gradient."""
    if ranks.group is None:
        return x[None]
    out = x.new_empty(ranks.size, *x.shape)
    dist.all_gather_into_tensor(out, x.contiguous()[None], group=ranks.group)
    return out
