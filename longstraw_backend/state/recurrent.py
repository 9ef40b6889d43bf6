"""State that is the same size after any number of tokens: what a recurrence carries forward.

Legend: B rows, C convolution channels, W convolution width, N value heads, K and V head dims.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longstraw_backend.kernels.staging import copy_over

from .layer import LayerState
from .placement import ON_DEVICE, Placement, bytes_of, room_for, zeros_for

__all__ = ["Recurrent", "RecurrentState"]


class Recurrent(NamedTuple):
    """A gated-delta-net layer after some token.

    Attributes:
        conv: the last W - 1 columns before the convolution, [B, C, W - 1], in the model's dtype;
            zeros where there are fewer tokens.
        recurrent: state of the delta rule, [B, N, K, V], float32 (float64 for a float64 model).
    """

    conv: Tensor
    recurrent: Tensor


class RecurrentState(LayerState):
    """One layer's state at a boundary between blocks; each boundary's is a value of its own.

    Only the visible boundary and the one being written are held, or, if it is tracked, all of them.
    """

    kind = "recurrent"

    def __init__(
        self, capacity: int = 0, page_tokens: int = 0, placement: Placement = ON_DEVICE
    ) -> None:
        del capacity, page_tokens  # the size depends on neither
        self.on_host = self.kind in placement.host
        self._after: dict[int, Recurrent] = {}
        self._written: Recurrent | None = None
        self._cotangents: dict[int, Recurrent] = {}

    def write(self, start: int, *values: Tensor) -> None:
        """Keep what a block leaves: ``conv`` and ``recurrent``, which it must not change later."""
        self._written = Recurrent(*(_on_host(x) if self.on_host else x for x in values))

    def commit(self, length: int, own: int) -> None:
        """What was written last is the state after ``length`` tokens."""
        del own  # the state is one, whatever the number of ranks
        assert self._written is not None, "a segment commits what every layer has written"
        earlier = self._after if self.cotangent_dtype is not None else {}
        self._after, self._written = earlier | {length: self._written}, None

    def visible(self, length: int) -> list[Recurrent]:
        """The state after ``length`` tokens, alone: it stands for all tokens before."""
        return [self._after[length]] if length else []

    def cotangents(self, length: int) -> list[Recurrent | None]:
        """Of the state after ``length`` tokens, alone."""
        if not length:
            return []
        return [None if self.cotangent_dtype is None else self._cotangents_at(length)]

    def cotangents_of(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Of the state after ``stop`` tokens, which is all that those before hand on."""
        del start
        return self._cotangents_at(stop)

    def _cotangents_at(self, length: int) -> Recurrent:
        assert self.cotangent_dtype is not None
        if length not in self._cotangents:
            state, dtype = self._after[length], self.cotangent_dtype
            self._cotangents[length] = Recurrent(*(zeros_for(x, dtype) for x in state))
        return self._cotangents[length]

    def drop_cotangents(self, start: int = 0) -> None:
        """Those of boundaries after ``start``."""
        for length in [n for n in self._cotangents if n > start]:
            del self._cotangents[length]

    def empty(self, capacity: int) -> RecurrentState:
        return RecurrentState()

    @property
    def nbytes(self) -> int:
        held = [*self._after.values(), *([self._written] if self._written else [])]
        return sum(bytes_of(x) for state in held for x in state)

    @property
    def cotangent_nbytes(self) -> int:
        return sum(bytes_of(x) for state in self._cotangents.values() for x in state)


def _on_host(x: Tensor) -> Tensor:
    room = room_for(x.shape, like=x, host=True)
    copy_over(room, x)
    return room
