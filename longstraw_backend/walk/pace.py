"""In which order a rank runs its passes, and how ranks with different work keep step.

Under FSDP a pass is a collective: all ranks must make passes of the same kinds in the same order. A
rank's order is written as run lengths over and over the kinds (so many scores, so many replays, so
many prompt blocks; and again); the largest of each over ranks is an order that every rank can
follow, with idle passes where it has none of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from longstraw_backend.parallel import Lockstep

__all__ = ["Pace", "Pass", "agreed_runs", "run_lengths"]


class Pass(IntEnum):
    """A call of the model, in the order that most work has them."""

    SCORE = 0
    """Forward with the head."""
    REPLAY = 1
    """Forward with the head, and backward."""
    PROMPT = 2
    """Forward without the head, and backward: a block of a prompt in reverse."""


def run_lengths(passes: Iterable[Pass]) -> list[int]:
    """How many of each kind, kinds taking turns: SCORE, REPLAY, PROMPT, SCORE, ...

    >>> run_lengths([Pass.SCORE, Pass.REPLAY, Pass.REPLAY, Pass.SCORE])
    [1, 2, 0, 1, 0, 0]
    """
    runs: list[int] = []
    cycle, before = 0, Pass.SCORE
    for kind in passes:
        cycle += kind < before
        before = kind
        slot = cycle * len(Pass) + kind
        runs.extend([0] * (slot + 1 - len(runs)))
        runs[slot] += 1
    return runs + [0] * (-len(runs) % len(Pass))


def agreed_runs(lockstep: Lockstep, runs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Run lengths of each group that all ranks can follow; ranks may differ in number of groups."""
    widths = lockstep.most([len(r) for r in runs])
    own = [list(r) + [0] * (w - len(r)) for r, w in zip(runs, widths, strict=False)]
    flat = lockstep.most([n for r in own for n in r])
    agreed, start = [], 0
    for width in widths:
        agreed.append(flat[start : start + width])
        start += width
    return agreed


@dataclass
class Pace:
    """Steps through the agreed passes of a batch.

    Attributes:
        idle: runs a pass that changes nothing.
        around: context of a pass with a backward; the argument says whether it is the last one.
        backwards: passes with a backward in the whole batch, over all groups.
    """

    idle: Callable[[Pass], None]
    around: Callable[[bool], AbstractContextManager[None]]
    backwards: int
    _runs: Sequence[int] = ()
    _slot: int = 0
    _used: int = 0
    _done: int = field(default=0)

    def begin(self, runs: Sequence[int]) -> None:
        """Begin the next group."""
        self._runs, self._slot, self._used = runs, 0, 0

    @contextmanager
    def turn(self, kind: Pass) -> Iterator[None]:
        """Make a pass of this rank's inside the block; others' come before it where they must."""
        while self._slot % len(Pass) != kind:
            self._next()
        with self._counted(kind):
            yield

    def finish(self) -> None:
        """Make the passes of this group that only other ranks have."""
        while self._slot < len(self._runs):
            self._next()

    def _next(self) -> None:
        kind = Pass(self._slot % len(Pass))
        while self._used < self._runs[self._slot]:
            with self._counted(kind):
                self.idle(kind)
        self._slot, self._used = self._slot + 1, 0

    @contextmanager
    def _counted(self, kind: Pass) -> Iterator[None]:
        self._used += 1
        if kind == Pass.SCORE:
            yield
            return
        self._done += 1
        with self.around(self._done == self.backwards):
            yield
