"""Requests of one prompt, gathered before they are answered together.

verl sends the responses of a group as separate requests. Answered one by one each would prefill the
prompt again (or rather find its captured state, but decode alone). So requests wait briefly for
their siblings: a group goes as soon as it is complete, and an incomplete one when nothing has
joined it for a moment. Correctness never depends on it: latecomers form a call of their own.

Pure bookkeeping over a clock that is passed in.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Gathering"]

T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    last_arrival: float
    members: list[T] = field(default_factory=list)


class Gathering(Generic[T]):
    """Groups of waiting requests, oldest first.

    Args:
        full: members of a complete group (`rollout.n`).
        window: seconds without a newcomer after which an incomplete group may go.
    """

    def __init__(self, full: int, window: float) -> None:
        self._full = full
        self._window = window
        self._groups: dict[Hashable, _Waiting[T]] = {}

    def __len__(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    def add(self, key: Hashable, member: T, now: float) -> None:
        """A request has arrived."""
        group = self._groups.setdefault(key, _Waiting(now))
        group.last_arrival = now
        group.members.append(member)

    def take(self, now: float) -> list[T] | None:
        """The next group to answer, at most `full` members; None when all should wait longer."""
        due = [k for k, g in self._groups.items() if len(g.members) >= self._full]
        due = due or [k for k, g in self._groups.items() if now >= g.last_arrival + self._window]
        if not due:
            return None
        group = self._groups[due[0]]
        taken, group.members = group.members[: self._full], group.members[self._full :]
        if not group.members:
            del self._groups[due[0]]
        return taken

    def wait(self, now: float) -> float | None:
        """Seconds until `take` may have something without a newcomer; None when nobody waits."""
        if not self._groups:
            return None
        if any(len(group.members) >= self._full for group in self._groups.values()):
            return 0.0
        return max(0.0, min(g.last_arrival for g in self._groups.values()) + self._window - now)
