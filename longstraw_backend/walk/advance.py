"""The one operation everything is built from."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw_backend.models import DrivenModel, Head, Walk
from longstraw_backend.state import Segment

__all__ = ["advance"]


def advance(
    model: DrivenModel,
    tokens_BT: Tensor,
    segment: Segment,
    *,
    grad: bool = False,
    commit: bool = True,
    head: Head | None = None,
    checkpointing: bool = False,
) -> tuple[Tensor, ...]:
    """Run a block of new tokens over the state.

        capture, one prompt chunk      grad=False, commit=True
        score, decode                  grad=False, commit=False / on a branch of its own, True
        replay                         grad=True,  commit=False

    Args:
        tokens_BT: token ids after ``segment``, [B, T] int64; B > 1 only where the rows share all
            state or each state has B rows.
        segment: state of all earlier tokens; extended by T tokens if ``commit``.
        head: what to return, from the last hidden states; None for a capture.

    Returns:
        The head's tensors; with ``grad`` they carry the graph of this block alone.
    """
    rows, length = tokens_BT.shape
    positions = torch.arange(segment.stop, segment.stop + length, device=tokens_BT.device)
    walk = Walk(segment, commit, head, checkpointing)
    with torch.set_grad_enabled(grad):
        out: tuple[Tensor, ...] = model.module(
            input_ids=tokens_BT, position_ids=positions.expand(rows, length), longstraw=walk
        )
    if commit:
        segment.commit(length)
    return out
