"""Ranks that share a sharded module make the same calls in the same order.

Under FSDP every forward and backward is a collective. Ranks with other numbers of groups, rows or
prompt chunks would hang, so they agree on the largest number and fill up with idle passes. A rank
that finds bad input must not raise alone for the same reason: all raise, with its message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

__all__ = ["Agreed", "AgreedValueError", "Lockstep"]


class Agreed(Exception):
    """Raised by all ranks together: none of them waits for another."""


class AgreedValueError(Agreed, ValueError):
    """Bad input on some rank."""


class Lockstep:
    """The ranks of ``group``; with None this rank is alone and nothing is communicated."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None

    def most(self, counts: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks of lists that may differ in length (missing: 0)."""
        if self.group is None:
            return list(counts)
        gathered: list[list[int]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(gathered, list(counts), group=self.group)
        width = max(len(c) for c in gathered)
        return [max(c[i] if i < len(c) else 0 for c in gathered) for i in range(width)]

    def summed(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks."""
        if self.group is None:
            return list(values)
        gathered: list[list[float]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(gathered, list(values), group=self.group)
        return [sum(column) for column in zip(*gathered, strict=True)]

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Run checks; if they raise on any rank, every rank raises ValueError with that message.

        Nothing inside may communicate.
        """
        if self.group is None:
            try:
                yield
            except ValueError as error:
                raise AgreedValueError(str(error)) from error
            return
        caught: Exception | None = None
        try:
            yield
        except Exception as error:
            caught = error
        found: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, None if caught is None else str(caught), group=self.group)
        for rank, message in enumerate(found):
            if message is not None:
                raise AgreedValueError(f"{message} (found on rank {rank} of the group)") from caught

    def same_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's tokens on every rank: sampling must not drift apart by a rounding."""
        if self.group is not None:
            dist.broadcast(tokens, src=dist.get_global_rank(self.group, 0), group=self.group)
        return tokens
