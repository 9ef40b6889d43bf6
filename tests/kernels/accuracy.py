"""How the kernel tests judge numbers, and how they make uninitialised GPU memory visible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["assert_as_accurate", "poison_cuda_memory"]


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_as_accurate(
    actual: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    conditioning: float = 1.0,
) -> None:
    """RMS error against float64 is at most 2 x (that of plain torch in the same dtype + rounding).

    Rounding is taken at the size of the largest result: where terms cancel (dq of a token with one
    key is exactly 0), it is the terms that were rounded. ``conditioning`` is the factor by which
    the definition enlarges a rounding of what it starts from.
    """
    size = max(_rms(e) for e in exact)
    for place, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert a.dtype == p.dtype and a.shape == p.shape == e.shape, f"result {place}"
        assert a.isfinite().all(), f"result {place} is not finite"
        rounding = conditioning * torch.finfo(a.dtype).eps * size
        error, bound = _rms(a - e), 2 * (_rms(p - e) + rounding)
        assert error <= bound, f"result {place}: error {error:.3e}, allowed {bound:.3e}"


def poison_cuda_memory() -> None:
    """Leave NaN in the memory that the next ``torch.empty`` on CUDA, ours or a kernel's, gets.

    Bytes of all ones are NaN in every floating dtype. Small and large tensors have pools of their
    own.
    """
    for size, count in ((1 << 18, 256), (1 << 28, 4)):
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(count)]
        del blocks
