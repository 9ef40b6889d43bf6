"""Prompt states kept for reuse: rollout, scoring and the first update see the same weights.

Keyed by prompt tokens, weights version and whether adapters are on, under budgets in bytes of the
device's and of the CPU's memory with least-recently-used eviction. A state of other weights is
stale and never returned.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from .segment import Segment

__all__ = ["PromptKey", "PromptStore"]


class PromptKey(NamedTuple):
    """What a prompt state depends on. With adapters off the version is that of the base weights."""

    digest: bytes
    version: int
    adapters: bool = True


class PromptStore:
    """States of whole prompts, each ending at its prompt boundary.

    Args:
        budget_bytes: for what rests on the device.
        host_budget_bytes: for what rests in CPU memory.
    """

    def __init__(self, budget_bytes: float, host_budget_bytes: float = 0) -> None:
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self._states: OrderedDict[PromptKey, Segment] = OrderedDict()

    def get(self, key: PromptKey) -> Segment | None:
        """The state of ``key``, marked as just used, or None."""
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def put(self, key: PromptKey, state: Segment) -> None:
        """Keep ``state``, then evict the least recently used others down to both budgets; the
        newest is always kept, so that budgets of 0 keep exactly one."""
        self._states[key] = state
        self._states.move_to_end(key)
        while self._over_budget() and len(self._states) > 1:
            self._states.popitem(last=False)

    def _over_budget(self) -> bool:
        host = self.host_nbytes
        return host > self.host_budget_bytes or self.nbytes - host > self.budget_bytes

    def drop_stale(self, version: int) -> None:
        """Drop states captured with adapters on under other weights than ``version``."""
        for key in [k for k in self._states if k.adapters and k.version != version]:
            del self._states[key]

    def drop(self, key: PromptKey) -> None:
        """Drop the state of ``key``, if there is one."""
        self._states.pop(key, None)

    def clear(self) -> None:
        """Drop everything."""
        self._states.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held in both places."""
        return sum(state.nbytes for state in self._states.values())

    @property
    def host_nbytes(self) -> int:
        """Those of :attr:`nbytes` that rest in CPU memory."""
        return sum(state.host_nbytes for state in self._states.values())

    def __len__(self) -> int:
        return len(self._states)
