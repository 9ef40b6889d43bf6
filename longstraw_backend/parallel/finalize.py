"""After the last backward of a step: one norm over all ranks, one clip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_gradients"]


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; collective if they are sharded.

    Parameters may be sharded over different meshes, as experts are: each shard counts once.

    Args:
        max_norm: of all gradients of all ranks together.

    Returns:
        The L2 norm before, a scalar and the same on every rank; not finite if any gradient isn't,
        and then gradients are not fit for use.
    """
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh[mesh].append(parameter)
    norms = [_norm(group) for group in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(parameters: list[Tensor]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
