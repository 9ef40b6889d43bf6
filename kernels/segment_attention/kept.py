"""What attention over pages gave, kept for the recomputation of a layer.

Under activation checkpointing a layer runs a second time before its backward. Its projections cost
what the block costs, attention what the whole prompt before it does, so output [B, N, T, H] and
log-sum-exp [B, N, T] stay, a layer each, until the second run takes them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["Kept"]


class Kept:
    """Of one call: empty, then what it gave, and empty again once that was taken."""

    def __init__(self) -> None:
        self._found: tuple[Tensor, Tensor] | None = None

    def once(self, attended: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp: those kept, or those of ``attended``, which are kept."""
        if self._found is not None:
            found, self._found = self._found, None
            return found
        out, lse = attended()
        self._found = out.detach(), lse.detach()  # without the graph that autograd hangs on them
        return out, lse
