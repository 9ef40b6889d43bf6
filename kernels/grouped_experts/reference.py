"""A matmul an expert in plain torch: autograd by construction, float64 stays float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["looped_linear"]


def looped_linear(x_SX: Tensor, weight_EYX: Tensor, offsets_E: Tensor) -> Tensor:
    """[S, Y]. Waits for the offsets, once.

    Experts without rows take part: their gradient is then zeros, not None.
    """
    ends = [0, *offsets_E.tolist()]
    if ends[-1] != x_SX.shape[0] or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"offsets: expected ascending ends of {x_SX.shape[0]} rows, got {ends[1:]}"
        )
    # Unbound at once: the backward of an index would fill a tensor of all experts for each.
    weights = weight_EYX.unbind(0)
    pieces = [linear(x_SX[a:b], w) for (a, b), w in zip(pairwise(ends), weights, strict=True)]
    return torch.cat(pieces)
