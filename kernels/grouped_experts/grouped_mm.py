"""torch's grouped matmul: one kernel for all experts, offsets stay on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["grouped_linear"]


def grouped_linear(x_SX: Tensor, weight_EYX: Tensor, offsets_E: Tensor) -> Tensor:
    """[S, Y]."""
    out: Tensor = _GroupedLinear.apply(x_SX, weight_EYX, offsets_E)
    return out


class _GroupedLinear(torch.autograd.Function):
    """torch's own backward refuses gradients that are not dense, and does not know that a call
    without rows has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[1])
        return _grouped_mm(x.contiguous(), weight.mT, offsets)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        if x.shape[0] == 0:
            return torch.zeros_like(x), torch.zeros_like(weight), None
        dy = dy.contiguous()
        dx = _grouped_mm(dy, weight, offsets) if ctx.needs_input_grad[0] else None
        dweight = _grouped_mm(dy.mT, x.contiguous(), offsets) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm")):
        if hasattr(owner, name):
            out: Tensor = getattr(owner, name)(a, b, offs=offsets)
            return out
    raise RuntimeError(
        f"grouped_mm: torch {torch.__version__} has none; take impl='reference' or a newer torch"
    )
