"""What a segment holds for one layer. A mixer of the model decides the kind:

KVPages          attention: keys and values, token by token
LatentPages      latent attention: latents with rotated keys, and index keys where it selects
RecurrentState   gated delta net: last pre-convolution columns and the recurrent state
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .placement import Placement, StateKind

__all__ = ["LayerState", "NewLayerState"]


class LayerState(ABC):
    """State of one layer over the tokens of one segment.

    Values are written first and become visible when the segment commits: a walk that failed half
    way can be repeated. What is visible is never written to again.

    Attributes:
        kind: what a :class:`Placement` knows it as.
        on_host: whether it rests in CPU memory; what is visible is handed out as it rests.
        cotangent_dtype: of cotangents, which are at least as wide as that; None if none are kept.
    """

    kind: ClassVar[StateKind]
    on_host: bool = False
    cotangent_dtype: torch.dtype | None = None

    @abstractmethod
    def write(self, start: int, *values: Tensor) -> None:
        """Take what a block leaves that begins after the segment's first ``start`` tokens."""

    @abstractmethod
    def commit(self, length: int, own: int) -> None:
        """The segment's first ``length`` tokens are now visible, all of them written: ``own`` on
        this rank, the others on ranks that share the prompt."""

    @abstractmethod
    def visible(self, length: int) -> list[Any]:
        """What tokens after the segment's first ``length`` need of it, in pieces; none for 0."""

    def track(self, dtype: torch.dtype) -> None:
        """Keep, from now on, what a walk in reverse needs: the state at every boundary between
        blocks, and cotangents of it."""
        self.cotangent_dtype = dtype

    @abstractmethod
    def cotangents(self, length: int) -> list[Any]:
        """Where later tokens add the cotangents of ``visible(length)``: the same pieces, zero at
        first and resting where the state does; None for a piece that is a constant."""

    @abstractmethod
    def cotangents_of(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """What has been added up for the values that tokens [start, stop) have written."""

    @abstractmethod
    def drop_cotangents(self, start: int = 0) -> None:
        """Forget those of tokens from ``start`` on."""

    @abstractmethod
    def empty(self, capacity: int) -> LayerState:
        """A fresh state of the same kind, for a branch of so many tokens, on the device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, wherever; without cotangents."""

    @property
    @abstractmethod
    def cotangent_nbytes(self) -> int:
        """Bytes of cotangents held."""


class NewLayerState(Protocol):
    """How a mixer makes the state of one layer."""

    def __call__(self, capacity: int, page_tokens: int, placement: Placement) -> LayerState: ...
