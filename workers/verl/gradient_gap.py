"""How far the gradient with a constant prompt state is from that of full-sequence training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longstraw_backend.oracle import gradients_of

__all__ = ["gap_metrics", "taken_gradients"]

Gradients = Mapping[str, Tensor]


def taken_gradients(module: nn.Module, backward: Callable[[], object]) -> dict[str, Tensor]:
    """Gradients by parameter name, this rank's shards; the parameters are left without.

    Args:
        backward: leaves gradients on the parameters, which have none before.
    """
    backward()
    gradients = {name: _local(g) for name, g in gradients_of(module).items()}
    module.zero_grad(set_to_none=True)
    return gradients


def gap_metrics(
    responses: Gradients, exact: Gradients, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Relative L2 |responses - exact| / |exact| and cosine, over all parameters and ranks.

    Args:
        group: the ranks that hold the shards; None for one rank.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name in responses.keys() | exact.keys():
        present = exact.get(name, responses.get(name))
        assert present is not None
        zero = torch.zeros_like(present)
        a, b = (_local(g.get(name, zero)).double() for g in (responses, exact))
        sums += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]).cpu()
    if group is not None:
        sums = sums.to(_device(exact))
        dist.all_reduce(sums, group=group)
    both, own, other = sums.tolist()
    apart = math.sqrt(max(0.0, own - 2 * both + other))
    return {
        "longstraw/exact_vs_response_only_rel_l2": apart / math.sqrt(other) if other else 0.0,
        "longstraw/exact_vs_response_only_cosine": both / math.sqrt(own * other)
        if own * other
        else 0.0,
    }


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _device(gradients: Gradients) -> torch.device:
    return next(iter(gradients.values())).device
