"""What one call of a driven model needs to know. It travels as the keyword ``longstraw``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Kept
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.state import Segment

from .cotangents import release

__all__ = ["Head", "Walk", "walk_of_call"]

Head = Callable[[Tensor, Tensor, Callable[..., Tensor]], tuple[Tensor, ...]]
"""From hidden states [B, T, D], output embedding [V, D] and its stock forward to what is wanted."""


@dataclass(frozen=True)
class Walk:
    """One call of the model: over which state, and what to return.

    Attributes:
        segment: state of all earlier tokens.
        commit: write what the new tokens leave to the segment (capture, decode) or leave the state
            as it is (score, replay).
        head: what to return; None returns nothing, or the last hidden states of a reverse walk.
        tokens: of the block, of which this rank computes its run.
        checkpointing: recompute each decoder layer in the backward.
        reverse: the new tokens are those of the segment's that follow: what cotangents they have
            of what they leave flow in when the backward comes to it.
        ranks: this rank among those that share the block.
        selections: by layer, what an indexer selected in this call, [B, T, K]: a recomputation of
            the layer takes it instead of scoring all keys again.
        attended: by layer, what attention over all tokens before gave, for a recomputation too.
    """

    segment: Segment
    commit: bool
    head: Head | None
    tokens: int
    checkpointing: bool = False
    reverse: bool = False
    ranks: Ranks = Ranks()
    selections: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[int, Kept] = field(default_factory=dict)

    @property
    def real(self) -> int:
        """Tokens of this rank's run that are no padding."""
        own = self.ranks.own(self.tokens)
        return int(own.stop) - int(own.start)

    def kept(self, layer: int) -> Kept | None:
        """Where attention of the layer keeps what it gives; None if it won't be recomputed."""
        if not (self.checkpointing and torch.is_grad_enabled()):
            return None
        return self.attended.setdefault(layer, Kept())

    def left(self, layer: int, out: Tensor, *values: Tensor) -> Tensor:
        """The layer's output, with ``values``, what its new tokens leave, on the way to it.

        Writes the values to the segment if they are to stay. In a reverse walk the backward of the
        result also hands the values the cotangents that later tokens have left for them.
        """
        if self.commit:
            self.segment.write(layer, *values)
        if not (self.reverse and self.segment.tracked and torch.is_grad_enabled()):
            return out
        start = self.segment.length
        cotangents = self.segment.layers[layer].cotangents_of(start, start + self.tokens)
        return release(out, cotangents, values)


def walk_of_call(longstraw: Walk | None, attention_mask: Any, mixer: str) -> Walk:
    """The walk that a mixer was called with.

    Raises:
        ValueError: there is none, or padding or another mask came with it.
    """
    if longstraw is None or attention_mask is not None:
        raise ValueError(
            f"{mixer} 'longstraw': expected a walk and no mask; call longstraw_backend.walk.advance"
        )
    return longstraw
