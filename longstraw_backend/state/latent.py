"""State of a latent-attention layer (MLA), with or without an indexer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .pages import TokenPages

__all__ = ["LatentPage", "LatentPages"]


class LatentPage(NamedTuple):
    """Consecutive resident tokens of one layer.

    Attributes:
        latents: latent after its norm and, behind it, the rotated key, [1 or B, 1, S, C].
        index_keys: keys of the indexer, [1 or B, 1, S, I]; None on a layer without one of its own.
    """

    latents: Tensor
    index_keys: Tensor | None = None


class LatentPages(TokenPages):
    """Latents and, on layers that select, index keys: one head, whatever the model has."""

    piece = LatentPage
    differentiable = 1
