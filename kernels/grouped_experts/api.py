"""Each expert's gated MLP over its own tokens, which lie together.

Legend: S rows (a token once for each of its experts), E experts, H hidden, I intermediate width,
F = 2 I.

    y[s] = down[e] gate(gate_up[e] x[s])      for rows s with offsets[e - 1] <= s < offsets[e]

where ``gate`` maps [S, F] to [S, I], by default act(first half) * second half. Weights of the
router, and where rows come from, are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .choice import Impl, choose_impl, get_grouped_linear

__all__ = ["grouped_experts"]


def grouped_experts(
    x_SH: Tensor,
    offsets_E: Tensor,
    gate_up_EFH: Tensor,
    down_EHI: Tensor,
    *,
    gate: Callable[[Tensor], Tensor],
    impl: Impl | None = None,
) -> Tensor:
    """Run every expert over its rows.

    Args:
        x_SH: rows sorted by expert, [S, H]; S may be 0.
        offsets_E: int32 [E], ascending: where the rows of each expert end. The last must be S,
            which only ``reference`` checks: it is on the device.
        gate_up_EFH: [E, F, H], E >= 1, in the dtype of x.
        down_EHI: [E, H, I], in the dtype of x.
        gate: [S, F] to [S, I], row by row; torch operations with a gradient.
        impl: ``reference`` or ``grouped_mm``; by default what the device and dtype ask for.

    Returns:
        [S, H] in the dtype of x, differentiable in x and both weights. An expert without rows gets
        a gradient of zeros.

    Raises:
        ValueError: a shape, dtype or device does not fit; the text says which.
        RuntimeError: ``grouped_mm`` is asked for, and this torch has none.
    """
    _check(x_SH, offsets_E, gate_up_EFH, down_EHI)
    linear = get_grouped_linear(choose_impl(x_SH.device, x_SH.dtype) if impl is None else impl)
    with torch.autocast(x_SH.device.type, enabled=False):
        hidden = gate(linear(x_SH, gate_up_EFH, offsets_E))
        return linear(hidden, down_EHI, offsets_E)


def _check(x: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor) -> None:
    if x.dim() != 2 or gate_up.dim() != 3 or gate_up.shape[0] == 0:
        raise ValueError(
            "x, gate_up: expected [S, H] and [E, F, H] with E >= 1, "
            f"got {list(x.shape)} and {list(gate_up.shape)}"
        )
    experts, double, hidden = gate_up.shape
    expected = {
        "gate_up": (gate_up, (experts, double, x.shape[1])),
        "down": (down, (experts, hidden, double // 2)),
        "offsets": (offsets, (experts,)),
    }
    for name, (t, shape) in expected.items():
        if t.shape != shape or t.device != x.device:
            raise ValueError(
                f"{name}: expected {list(shape)} on {x.device}, got {list(t.shape)} on {t.device}"
            )
    for name, t, dtype in (
        ("gate_up", gate_up, x.dtype),
        ("down", down, x.dtype),
        ("offsets", offsets, torch.int32),
    ):
        if t.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype} for x of {x.dtype}, got {t.dtype}")
