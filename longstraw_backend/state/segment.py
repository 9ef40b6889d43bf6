"""A segment: consecutive tokens of one path, with the state they leave behind.

State is a stack (later a tree) of segments. The prompt is the root; a response, a decoded
continuation or a turn is a branch on top. A segment is immutable while something stands on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page

from .pages import KVPages

__all__ = ["Segment"]


class Segment:
    """State of the tokens at absolute positions [start, stop) of a path.

    Owned by whoever created it, on one rank; lives until dropped by its owner. ``length`` tokens
    are visible; ``capacity`` is fixed at creation and is what memory is allocated for.
    """

    def __init__(
        self, num_layers: int, capacity: int, page_tokens: int, parent: Segment | None = None
    ) -> None:
        self.parent = parent
        self.start = parent.stop if parent is not None else 0
        self.length = 0
        self.capacity = capacity
        self._layers = [KVPages(capacity, page_tokens) for _ in range(num_layers)]
        self._page_tokens = page_tokens
        self._holds = 0

    @property
    def stop(self) -> int:
        """Absolute position of the next token."""
        return self.start + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of this segment alone, parents excluded."""
        return sum(layer.nbytes for layer in self._layers)

    def resident(self, layer: int) -> list[Page]:
        """Pages of all visible tokens from position 0, parents first."""
        below = self.parent.resident(layer) if self.parent is not None else []
        return below + self._layers[layer].visible(self.length)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Lay new keys and values after the visible tokens; :meth:`commit` makes them visible."""
        self._check_free()
        self._layers[layer].write(self.length, k, v)

    def commit(self, tokens: int) -> None:
        """Make ``tokens`` written tokens of every layer visible."""
        self._check_free()
        self.length += tokens

    def _check_free(self) -> None:
        if self._holds:
            raise ValueError(
                f"segment [{self.start}, {self.stop}): it is immutable while {self._holds} "
                "branch or replay stands on it; write to a branch instead"
            )

    @contextmanager
    def hold(self) -> Iterator[Segment]:
        """Keep the segment immutable for a while."""
        self._holds += 1
        try:
            yield self
        finally:
            self._holds -= 1

    @contextmanager
    def branch(self, capacity: int) -> Iterator[Segment]:
        """A segment on top of this one; popped, with its state, at the end of the block."""
        with self.hold():
            yield Segment(len(self._layers), capacity, self._page_tokens, parent=self)
