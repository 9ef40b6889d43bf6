"""Where a prompt's state rests: on the device that computes, or in pinned CPU memory beside it.

State in CPU memory is brought to the device, a page or a layer at a time, when a kernel needs it;
see ``kernels/staging.py``. A branch on top of a prompt always rests on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_backend.choices import STATE_KINDS, Staging, StateKind

__all__ = [
    "ON_DEVICE",
    "STATE_KINDS",
    "Placement",
    "StateKind",
    "bytes_of",
    "room_for",
    "zeros_for",
]


@dataclass(frozen=True)
class Placement:
    """Where each kind of state rests.

    Attributes:
        host: kinds that rest in CPU memory, pinned if the device is a CUDA device; the others rest
            on the device.
        staging: how attention brings its pages over.
    """

    host: frozenset[StateKind] = frozenset()
    staging: Staging = "segments"


ON_DEVICE = Placement()


def room_for(shape: Sequence[int], like: Tensor, host: bool) -> Tensor:
    """Unwritten memory in the dtype of ``like``, on its device or in CPU memory."""
    if host:
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def zeros_for(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of ``x``, where it rests, in ``dtype`` or that of ``x`` if it is wider."""
    wide = torch.promote_types(x.dtype, dtype)
    return torch.zeros(x.shape, dtype=wide, device=x.device, pin_memory=x.is_pinned())


def bytes_of(x: Tensor) -> int:
    """Bytes taken by memory from :func:`room_for`: torch pins powers of two."""
    if x.is_cuda or not x.is_pinned():
        return x.nbytes
    return 1 << (x.nbytes - 1).bit_length() if x.nbytes else 0
