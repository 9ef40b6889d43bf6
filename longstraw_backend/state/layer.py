"""What a segment holds for one layer. A mixer of the model decides the kind:

KVPages          attention: keys and values, token by token
LatentPages      latent attention: latents with rotated keys, and index keys where it selects
RecurrentState   gated delta net: last pre-convolution columns and the recurrent state
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

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
    """

    kind: ClassVar[StateKind]
    on_host: bool = False

    @abstractmethod
    def write(self, start: int, *values: Tensor) -> None:
        """Take what a block leaves that begins after the segment's first ``start`` tokens."""

    @abstractmethod
    def commit(self, length: int) -> None:
        """The segment's first ``length`` tokens, all of them written, are now visible."""

    @abstractmethod
    def visible(self, length: int) -> list[Any]:
        """What tokens after the segment's first ``length`` need of it, in pieces; none for 0."""

    @abstractmethod
    def empty(self, capacity: int) -> LayerState:
        """A fresh state of the same kind, for a branch of so many tokens, on the device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, wherever."""


class NewLayerState(Protocol):
    """How a mixer makes the state of one layer."""

    def __call__(self, capacity: int, page_tokens: int, placement: Placement) -> LayerState: ...
