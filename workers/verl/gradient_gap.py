"""How far the gradient with a constant prompt state is from that of full-sequence training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from longstraw_backend.config import Gradient
from longstraw_backend.oracle import gradients_of
from longstraw_backend.parallel import Lockstep

__all__ = ["gap_metrics", "other_gradient", "taken_gradients"]

Gradients = Mapping[str, Tensor]


def other_gradient(gradient: Gradient) -> Gradient:
    """The one that an update does not follow."""
    return "exact" if gradient == "response_only" else "response_only"


def taken_gradients(module: nn.Module, backward: Callable[[], object]) -> Gradients:
    """Gradients by parameter name; the parameters are left without.

    Args:
        backward: leaves gradients on the parameters, which have none before.
    """
    backward()
    gradients = gradients_of(module)
    module.zero_grad(set_to_none=True)
    return gradients


def gap_metrics(
    gradient: Gradient, ours: Gradients, other: Gradients, lockstep: Lockstep
) -> dict[str, float]:
    """Relative L2 |response_only - exact| / |exact| and cosine, over all parameters and ranks.

    Args:
        gradient: which one ``ours`` is.
        ours: whole gradients, or this rank's shards as DTensors.
        lockstep: the ranks that hold the shards.
    """
    exact, responses = (ours, other) if gradient == "exact" else (other, ours)
    both, own, full = lockstep.summed(_products(responses, exact))
    apart = math.sqrt(max(0.0, own - 2 * both + full))
    return {
        "longstraw/exact_vs_response_only_rel_l2": apart / math.sqrt(full) if full else 0.0,
        "longstraw/exact_vs_response_only_cosine": both / (math.sqrt(own * full) or 1.0),
    }


def _products(a: Gradients, b: Gradients) -> list[float]:
    """a . b, a . a and b . b of this rank's shards."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name in a.keys() | b.keys():
        zero = torch.zeros_like(a[name] if name in a else b[name])
        x, y = (_local(g.get(name, zero)).double() for g in (a, b))
        sums += torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()]).cpu()
    return sums.tolist()


def _local(x: Tensor) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local
