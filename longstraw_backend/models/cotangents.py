"""Where the graph of one block meets cotangents that are kept outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import add_over

__all__ = ["collected", "release"]


def release(out: Tensor, cotangents: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """``out``; its backward gives each of ``values`` the cotangent at its place too.

    Values without a cotangent, after the last, get none. The backward must come by ``out``, be it
    with a gradient of zeros.
    """
    released: Tensor = _Release.apply(out, tuple(cotangents), *values[: len(cotangents)])
    return released


def collected(x: Tensor, into: Tensor | None) -> Tensor:
    """``x``, a state that a block begins with; its gradient is added to ``into``, or, without
    autograd or for a constant, goes nowhere."""
    if into is None or not torch.is_grad_enabled():
        return x
    leaf = x.detach().requires_grad_()
    leaf.register_hook(lambda grad: add_over(into, grad))
    return leaf


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, cotangents: Sequence[Tensor], *values: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        ctx.kinds = [(v.dtype, v.device) for v in values]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        given = zip(ctx.cotangents, ctx.kinds, strict=True)
        return dout, None, *(c.to(device, dtype) for c, (dtype, device) in given)
