"""Recurrent state of one layer: a value at each boundary, seen only after commit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw_backend.state import KVPages, Recurrent, RecurrentState, Segment


def value(number: float) -> Recurrent:
    return Recurrent(torch.full((1, 2, 3), number), torch.full((1, 2, 4, 4), number))


def hybrid(capacity: int) -> Segment:
    """One recurrent layer and one attention layer."""
    return Segment([RecurrentState(), KVPages(capacity, 2)], capacity)


def extend(segment: Segment, number: float, count: int = 1) -> None:
    segment.write(0, *value(number))
    segment.write(1, *(torch.full((1, 1, count, 2), number) for _ in range(2)))
    segment.commit(count)


def last(segment: Segment) -> float:
    """The number in the state that new tokens would start from."""
    found: Tensor = torch.cat([x.flatten() for x in segment.resident(0)[-1]])
    assert (found == found[0]).all()
    return found[0].item()


def test_an_empty_segment_has_no_state() -> None:
    assert hybrid(5).resident(0) == [] and hybrid(5).nbytes == 0


def test_written_state_is_visible_only_after_commit() -> None:
    segment = hybrid(5)
    extend(segment, 1.0, 2)
    segment.write(0, *value(7.0))
    assert last(segment) == 1.0 and segment.length == 2
    segment.write(1, *(torch.zeros(1, 1, 1, 2) for _ in range(2)))
    segment.commit(1)
    assert last(segment) == 7.0 and segment.length == 3


def test_a_walk_that_failed_half_way_can_be_repeated() -> None:
    segment = hybrid(5)
    extend(segment, 1.0)
    segment.write(0, *value(70.0))  # the second layer fails: nothing is committed
    assert last(segment) == 1.0
    extend(segment, 2.0)
    assert last(segment) == 2.0


def test_one_boundary_is_held_however_many_blocks() -> None:
    segment = hybrid(9)
    extend(segment, 1.0)
    size = segment.nbytes
    for number in range(2, 10):
        extend(segment, float(number))
    pages = 9 * 2 * 2 * 4  # tokens, k and v, dim, bytes
    assert segment.nbytes == pages + (2 * 3 + 2 * 4 * 4) * 4
    assert segment.nbytes - size == pages - 2 * 2 * 2 * 4


def test_a_branch_stands_on_its_parent_and_is_popped() -> None:
    root = hybrid(3)
    extend(root, 1.0, 3)
    before = [t.data_ptr() for t in root.resident(0)[-1]]
    with root.branch(4) as branch:
        assert last(branch) == 1.0 and branch.nbytes == 0
        extend(branch, 5.0, 2)
        assert last(branch) == 5.0 and last(root) == 1.0
        with branch.branch(1) as turn:
            assert last(turn) == 5.0
    assert last(root) == 1.0 and [t.data_ptr() for t in root.resident(0)[-1]] == before


def test_a_held_segment_takes_no_state() -> None:
    root = hybrid(3)
    extend(root, 1.0)
    with root.hold(), pytest.raises(ValueError, match="immutable"):
        root.write(0, *value(2.0))


def test_a_segment_does_not_commit_what_a_layer_has_not_written() -> None:
    segment = hybrid(3)
    with pytest.raises(AssertionError, match="every layer has written"):
        segment.commit(1)
    assert segment.length == 0
