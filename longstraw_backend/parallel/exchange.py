"""What ranks that share a prompt exchange, with its gradient.

A block of T tokens is cut into ``size`` equal runs; rank r has run r (the caller pads the block).
Each operation is its own inverse's backward: what was gathered is summed back to its owners, what
was dealt out is collected again. Sums are made in order of rank: every repetition gives the same
bits.

Rows for experts are dealt unevenly: each rank says how many go where.

What leaves this rank for others is counted in ``Ranks.traffic``, by the purpose of ``Ranks.named``.

Legend: R ranks, T tokens of the block, T/R those of a rank, S rows of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import Purpose, Traffic

__all__ = [
    "Arriving",
    "Ranks",
    "all_gathered",
    "all_to_all",
    "arriving",
    "by_run",
    "deal",
    "gather_tokens",
    "own_run",
    "side_by_side",
    "summed_run",
    "swap",
    "whole",
]


@dataclass(frozen=True)
class Ranks:
    """This rank's place among those that share a prompt.

    Attributes:
        group: None if it is alone.
        rank: within the group.
        size: of the group.
        purpose: what is exchanged through this value.
        traffic: counts it; shared by all values made from one.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    purpose: Purpose = field(default="other", compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a group."""
        if group is None or dist.get_world_size(group) == 1:
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def named(self, purpose: Purpose) -> Ranks:
        """The same ranks and counter, for exchanges of another purpose."""
        return replace(self, purpose=purpose)

    def run(self, tokens: int) -> int:
        """Tokens of each rank's run of a block, padding included."""
        return -(-tokens // self.size)

    def own(self, tokens: int) -> slice:
        """Which tokens of a block are this rank's; the last ranks may have fewer, or none."""
        run = self.run(tokens)
        start = min(self.rank * run, tokens)
        return slice(start, min(start + run, tokens))

    def count(self, nbytes: int) -> None:
        """Add bytes that leave this rank for others."""
        self.traffic.add(self.purpose, nbytes)


def all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Part s of every rank r, [R, ...], goes to rank s, as its part r. Without gradient."""
    if ranks.group is None:
        return parts
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    ranks.count(sent.nbytes // ranks.size * (ranks.size - 1))
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received


def swap(parts: Tensor, ranks: Ranks) -> Tensor:
    """:func:`all_to_all` with its gradient, which is another one."""
    out: Tensor = _Swap.apply(parts, ranks)
    return out


def deal(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Ranks) -> Tensor:
    """Rows [S, ...], the first ``sent[0]`` for rank 0 and so on, go there; with gradient.

    Args:
        sent: rows for each rank, S together; 0 is fine.
        received: rows from each rank: its ``sent`` for this one.

    Returns:
        [S', ...], S' the sum of ``received``: in order of rank.
    """
    out: Tensor = _Deal.apply(rows, list(sent), list(received), ranks)
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


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], ranks: Ranks
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.ranks = sent, received, ranks
        return _dealt(rows, sent, received, ranks)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        return _dealt(drows, ctx.received, ctx.sent, ctx.ranks), None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return side_by_side(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return summed_run(dx, ctx.ranks, ctx.dim), None, None


def side_by_side(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """All ranks' runs as a block along ``dim``. Without gradient."""
    return torch.cat(list(all_gathered(x, ranks)), dim)


def by_run(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """A block along ``dim`` as its runs, [R, ...]."""
    return torch.stack(x.chunk(ranks.size, dim))


def summed_run(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """This rank's run of the sum over ranks of what each has for the block."""
    return all_to_all(by_run(x, ranks, dim), ranks).sum(0)


def whole(x: Tensor, tokens: int, ranks: Ranks) -> Tensor:
    """All ranks' runs [..., T/R] as the block [..., tokens], without padding. Without gradient."""
    return side_by_side(x, ranks, -1)[..., :tokens]


def own_run(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's run of a block [..., tokens], filled up with zeros."""
    run = ranks.run(x.shape[-1])
    filled = torch.nn.functional.pad(x, (0, run * ranks.size - x.shape[-1]))
    return filled[..., ranks.rank * run : (ranks.rank + 1) * run]


def _dealt(rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
    if ranks.group is None:
        return rows.clone()
    out = rows.new_empty(sum(received), *rows.shape[1:])
    leaving = rows.shape[0] - sent[ranks.rank]
    ranks.count(leaving * rows.shape[1:].numel() * rows.element_size())
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=ranks.group)
    return out


def all_gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """Every rank's ``x``, [R, ...]. Without gradient."""
    if ranks.group is None:
        return x[None]
    return _start_gathering(x, ranks, later=False).out


@dataclass(frozen=True)
class Arriving:
    """A block that is on its way from all ranks; :func:`arriving` makes it.

    Attributes:
        own: this rank's part, which must live until it is sent.
        out: where the parts arrive, [R, ...].
        work: the exchange; None if there is nothing to wait for.
        dim: of ``own``, along which the parts lie side by side.
    """

    own: Tensor
    out: Tensor
    work: dist.Work | None
    dim: int

    def wait(self) -> Tensor:
        """The block. Every rank must wait for what it has started."""
        if self.work is not None:
            self.work.wait()
        return torch.cat(list(self.out), self.dim)


def arriving(x: Tensor, ranks: Ranks, dim: int) -> Arriving:
    """:func:`side_by_side` begun: the caller computes, and waits for it when it needs it.

    All ranks begin their exchanges in the same order.
    """
    if ranks.group is None:
        return Arriving(x, x[None], None, dim)
    return _start_gathering(x, ranks, dim, later=True)


def _start_gathering(x: Tensor, ranks: Ranks, dim: int = 0, *, later: bool) -> Arriving:
    own, out = x.contiguous(), x.new_empty(ranks.size, *x.shape)
    ranks.count(own.nbytes * (ranks.size - 1))
    work = dist.all_gather_into_tensor(out, own[None], group=ranks.group, async_op=later)
    return Arriving(own, out, work, dim)
