"""Which code multiplies: one choice for a device and dtype, never for a phase of training.

A grouped kernel and a matmul an expert round differently: scoring and replay must run the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from .grouped_mm import grouped_linear
from .reference import looped_linear

__all__ = ["IMPLS", "Impl", "choose_impl", "get_grouped_linear"]

Impl = Literal["reference", "grouped_mm"]
IMPLS: tuple[str, ...] = get_args(Impl)


def choose_impl(device: torch.device, dtype: torch.dtype) -> Impl:
    """``grouped_mm`` for bfloat16 on CUDA where torch has it, else ``reference``.

    In other dtypes and on the CPU torch's function is a loop too.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "reference"
    return "grouped_mm" if _has_kernel(device) else "reference"


def get_grouped_linear(impl: Impl) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """From rows [S, X], weights [E, Y, X] and offsets [E] to [S, Y].

    Raises:
        ValueError: there is no such implementation.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}")
    return looped_linear if impl == "reference" else grouped_linear


@cache
def _has_kernel(device: torch.device) -> bool:
    """``torch._grouped_mm`` needs Hopper; with the public function came kernels for Ampere."""
    capability = torch.cuda.get_device_capability(device)
    if hasattr(torch.nn.functional, "grouped_mm"):
        return capability >= (8, 0)
    return hasattr(torch, "_grouped_mm") and capability >= (9, 0)
