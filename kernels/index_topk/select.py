"""The best k of each row, with one deterministic order: higher score first, ties by lower position.

Legend: S queries, K candidates of a query, in ascending order of position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ABSENT", "Candidates", "keep_best", "merge_candidates"]

ABSENT = -1
"""Position of a candidate that is none."""


class Candidates(NamedTuple):
    """Candidates: scores [S, K], -inf where there is none, and positions [S, K] int32.

    Positions ascend along a row as far as scores are not -inf; those of the others mean nothing
    until :meth:`selection` replaces them.
    """

    scores: Tensor
    positions: Tensor

    def padded(self, width: int) -> Candidates:
        """With columns of no candidates at the right, [S, width]."""
        missing = (0, width - self.scores.shape[1])
        pad = torch.nn.functional.pad
        scores = pad(self.scores, missing, value=float("-inf"))
        return Candidates(scores, pad(self.positions, missing, value=ABSENT))

    def selection(self, k: int) -> Tensor:
        """Positions [S, k] int32, ascending, then ``ABSENT`` where there are fewer than k."""
        none = torch.iinfo(torch.int32).max
        found = self.positions.masked_fill(self.scores == float("-inf"), none).sort(dim=1).values
        found = found.masked_fill(found == none, ABSENT)
        missing = k - found.shape[1]
        return torch.nn.functional.pad(found, (0, missing), value=ABSENT)


def keep_best(candidates: Candidates, k: int) -> Candidates:
    """The best k of each row in their given order, of equal scores the ones further left.

    The k-th largest score is a value that any exact top-k returns alike, whichever of equal entries
    it lists; everything above it is kept, and as many of its equals from the left as there is room.
    """
    scores, positions = candidates
    if scores.shape[1] <= k:
        return candidates
    least = scores.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = scores > least, scores == least
    room = k - above.sum(dim=1, keepdim=True)
    kept = above | (level & (level.cumsum(dim=1) <= room))
    return Candidates(*(t[kept].reshape(-1, k) for t in (scores, positions)))


def merge_candidates(parts: Sequence[Candidates], k: int) -> Tensor:
    """Selection [S, k] int32 from the candidates of several owners of keys, in any order.

    Equal to the selection of one owner of all keys: a key that is among the best k overall is among
    the best k of its owner, and ties are resolved by position here as there.
    """
    scores = torch.cat([p.scores for p in parts], dim=1)
    positions = torch.cat([p.positions for p in parts], dim=1)
    positions, order = positions.sort(dim=1, stable=True)
    return keep_best(Candidates(scores.gather(1, order), positions), k).selection(k)
