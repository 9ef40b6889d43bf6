"""Ranks that bench one model together: the first speaks, all wait for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["largest", "speaks", "wait_for_all"]


def speaks() -> bool:
    """Whether this process prints and writes: it is alone or the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    """Until all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()


def largest(count: int, device: torch.device) -> int:
    """Of all ranks'."""
    if not dist.is_initialized():
        return count
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
