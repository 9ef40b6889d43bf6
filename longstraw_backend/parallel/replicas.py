"""What several ranks have copies of must stay equal, to the bit: a check for debugging.

A tensor that is not sharded has a copy on every rank; of a DTensor those ranks have the same part
that differ only along dimensions of its mesh over which it is replicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .lockstep import Agreed

__all__ = ["ReplicasDifferError", "check_replicas"]


class ReplicasDifferError(Agreed, RuntimeError):
    """Copies of a tensor differ; raised on every rank."""


class _Copy(NamedTuple):
    ranks: tuple[int, ...]  # that should have the same
    digest: bytes


def check_replicas(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Compare copies of parameters, buffers and optimizer state by hash. Collective over all ranks.

    Every tensor is brought to the CPU once.

    Raises:
        ReplicasDifferError: on every rank; names the first tensor that differs, and the ranks.
    """
    mine = {name: _copy(tensor) for name, tensor in _named(module, optimizer)}
    copies: list[dict[str, _Copy]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(copies, mine)
    for name in sorted(set().union(*copies)):
        for ranks in sorted({c[name].ranks for c in copies if name in c}):
            _compare(name, {r: copies[r].get(name) for r in ranks})


def _compare(name: str, copies: dict[int, _Copy | None]) -> None:
    alike: dict[_Copy | None, list[int]] = {}
    for rank, copy in copies.items():
        alike.setdefault(copy, []).append(rank)
    if len(alike) > 1:
        differ = ", ".join(f"ranks {ranks}" for ranks in alike.values())
        raise ReplicasDifferError(
            f"check_replicas: expected equal copies of {name} on ranks {list(copies)}, "
            f"got {len(alike)} different ones: {differ}; restart from the last checkpoint"
        )


def _named(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    for name, parameter in module.named_parameters():
        yield name, parameter
        state: dict[str, Any] = optimizer.state.get(parameter, {}) if optimizer else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{name} ({key} of the optimizer)", value


def _copy(tensor: Tensor) -> _Copy:
    ranks = tuple(range(dist.get_world_size()))
    if isinstance(tensor, DTensor):
        ranks, tensor = _same_part(tensor), tensor.to_local()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _Copy(
        ranks, hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()
    )


def _same_part(tensor: DTensor) -> tuple[int, ...]:
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "the tensor is not on this rank"
    part = tuple(
        slice(None) if placement.is_replicate() else here
        for placement, here in zip(tensor.placements, place, strict=True)
    )
    return tuple(tensor.device_mesh.mesh[part].reshape(-1).tolist())
