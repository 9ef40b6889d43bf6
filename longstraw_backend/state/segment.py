"""A segment: consecutive tokens of one path, with the state they leave behind.

State is a stack (later a tree) of segments. The prompt is the root; a response, a decoded
continuation or a turn is a branch on top. A segment is immutable while something stands on it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.staging import Staging

from .layer import LayerState

__all__ = ["Segment"]


class Segment:
    """State of the tokens at absolute positions [start, stop) of a path.

    Owned by whoever created it, on one rank; lives until dropped by its owner. ``length`` tokens
    are visible; ``capacity`` is fixed at creation and is what memory is allocated for. ``layers``
    are empty states, one a layer, of the kind that the layer's mixer needs. ``staging`` is how
    attention brings over those that rest in CPU memory; a branch has that of its root. With
    ``cotangents`` it is tracked: kept in a form that can be walked in reverse, with cotangents in
    that dtype or wider.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        capacity: int,
        parent: Segment | None = None,
        staging: Staging = "segments",
        cotangents: torch.dtype | None = None,
    ) -> None:
        self.parent = parent
        self.staging: Staging = staging if parent is None else parent.staging
        self.start = parent.stop if parent is not None else 0
        self.length = 0
        self.capacity = capacity
        self.layers = layers
        self._holds = 0
        self._runs: list[range] = []
        self.tracked = cotangents is not None
        if cotangents is not None:
            for layer in layers:
                layer.track(cotangents)

    @property
    def stop(self) -> int:
        """Absolute position of the next token."""
        return self.start + self.length

    @property
    def runs(self) -> list[range]:
        """Absolute positions of all visible tokens from position 0 that are on this rank: a run a
        block or, where this rank has them all, one a segment."""
        below = self.parent.runs if self.parent is not None else []
        return below + [
            range(run.start, min(run.stop, self.stop))
            for run in self._runs
            if run.start < self.stop
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of this segment alone, parents and cotangents excluded."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def cotangent_nbytes(self) -> int:
        """Bytes of its cotangents."""
        return sum(layer.cotangent_nbytes for layer in self.layers)

    @property
    def host_nbytes(self) -> int:
        """Those of :attr:`nbytes` that rest in CPU memory."""
        return sum(layer.nbytes for layer in self.layers if layer.on_host)

    def resident(self, layer: int) -> list[Any]:
        """State of all visible tokens from position 0 in pieces of the layer's kind, parents first,
        each where it rests.

        Pages add up; of recurrent states the last stands for all before it.
        """
        below = self.parent.resident(layer) if self.parent is not None else []
        return below + self.layers[layer].visible(self.length)

    def cotangents(self, layer: int) -> list[Any]:
        """Where cotangents of :meth:`resident` add up, piece by piece; None for constants."""
        below = self.parent.cotangents(layer) if self.parent is not None else []
        return below + self.layers[layer].cotangents(self.length)

    def before(self, length: int) -> Segment:
        """A tracked segment as it was when only ``length`` tokens, all of whole blocks, were
        visible: what a block that is walked again stands on."""
        view = copy.copy(self)
        view.length = length
        return view

    def drop_cotangents(self, start: int = 0) -> None:
        """Forget cotangents of its tokens from ``start`` on: they have been passed on."""
        for layer in self.layers:
            layer.drop_cotangents(start)

    def write(self, layer: int, *values: Tensor) -> None:
        """Lay what new tokens leave after the visible ones; :meth:`commit` makes it visible."""
        self._check_free()
        self.layers[layer].write(self.length, *values)

    def commit(self, tokens: int, own: slice | None = None) -> None:
        """Make ``tokens`` written tokens of every layer visible; those of ``own``, by default all,
        are on this rank."""
        self._check_free()
        assert self.length + tokens <= self.capacity, f"segment holds {self.capacity} tokens"
        mine = slice(0, tokens) if own is None else own
        for layer in self.layers:
            layer.commit(self.length + tokens, mine.stop - mine.start)
        if mine.stop > mine.start:
            start = self.stop + mine.start
            if self._runs and self._runs[-1].stop == start:
                start = self._runs.pop().start
            self._runs.append(range(start, self.stop + mine.stop))
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
    def branch(
        self, capacity: int, cotangents: torch.dtype | None = None, own: int | None = None
    ) -> Iterator[Segment]:
        """A segment on top of this one; popped, with its state, at the end of the block. Of its
        ``capacity`` tokens at most ``own``, by default all, are on this rank."""
        room = capacity if own is None else own
        layers = [layer.empty(room) for layer in self.layers]
        with self.hold():
            yield Segment(layers, capacity, parent=self, cotangents=cotangents)
