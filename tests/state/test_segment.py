"""Segments: a branch stands on an immutable parent and is popped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw_backend.state import KVPages, Segment

LAYERS = 2


def root_segment(tokens: int, page_tokens: int) -> Segment:
    """An empty segment of attention layers."""
    return Segment([KVPages(tokens, page_tokens) for _ in range(LAYERS)], tokens)


def extend(segment: Segment, first: int, count: int) -> None:
    """What a walk does: write every layer, then make the tokens visible."""
    for layer in range(LAYERS):
        segment.write(layer, *content(layer, first, count))
    segment.commit(count)


def content(layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    k = torch.arange(first, first + count, dtype=torch.float32)[:, None] + 1000 * layer
    return k.expand(1, 1, -1, 2).clone(), -k.expand(1, 1, -1, 2)


def seen(segment: Segment, layer: int) -> list[int]:
    """Keys of all resident tokens, in order; checks that values go with them."""
    found: list[int] = []
    for page in segment.resident(layer):
        assert torch.equal(page.v, -page.k)
        found += [int(x) for x in page.k[0, 0, :, 0]]
    return found


def prompt(tokens: int = 5, page_tokens: int = 2) -> Segment:
    segment = root_segment(tokens, page_tokens)
    extend(segment, 0, tokens)
    return segment


def test_written_tokens_are_visible_only_after_commit() -> None:
    segment = root_segment(5, 2)
    segment.write(0, *content(0, 0, 3))
    assert seen(segment, 0) == [] and segment.stop == 0
    segment.write(1, *content(1, 0, 3))
    segment.commit(3)
    assert seen(segment, 0) == [0, 1, 2] and seen(segment, 1) == [1000, 1001, 1002]
    assert (segment.start, segment.length, segment.stop) == (0, 3, 3)


def test_residents_come_parents_first() -> None:
    root = prompt(5)
    with root.branch(3) as turn:
        extend(turn, 5, 3)
        with turn.branch(2) as response:
            assert seen(response, 1) == [1000 + i for i in range(8)]
            extend(response, 8, 1)
            assert (response.start, response.stop) == (8, 9)
            assert seen(response, 0) == list(range(9))
            assert seen(root, 0) == list(range(5))


def test_a_branch_is_popped_and_the_parent_is_as_before() -> None:
    root = prompt(5)
    before = root.nbytes, [page.k.data_ptr() for page in root.resident(0)]
    for _ in range(2):
        with root.branch(4) as branch:
            assert branch.length == 0 and branch.start == 5
            extend(branch, 5, 4)
            assert branch.nbytes > 0
    assert (root.nbytes, [page.k.data_ptr() for page in root.resident(0)]) == before
    assert seen(root, 0) == list(range(5))


def test_siblings_do_not_see_each_other() -> None:
    root = prompt(2)
    with root.branch(1) as left, root.branch(1) as right:
        extend(left, 10, 1)
        extend(right, 20, 1)
        assert seen(left, 0) == [0, 1, 10] and seen(right, 0) == [0, 1, 20]


@pytest.mark.parametrize("by", ["branch", "hold"])
def test_a_segment_is_immutable_while_something_stands_on_it(by: str) -> None:
    root = root_segment(9, 4)
    extend(root, 0, 5)
    with root.branch(1) if by == "branch" else root.hold():
        with pytest.raises(ValueError) as error:
            root.write(0, *content(0, 5, 1))
        assert str(error.value) == (
            "segment [0, 5): it is immutable while 1 branch or replay stands on it; "
            "write to a branch instead"
        )
    extend(root, 5, 1)
    assert seen(root, 0) == list(range(6))


def test_holds_nest_and_end_with_an_exception_too() -> None:
    root = root_segment(9, 4)
    with pytest.raises(KeyError), root.hold():
        with root.branch(1):
            pass
        with pytest.raises(ValueError, match="while 1 branch"):
            root.write(0, *content(0, 0, 1))
        raise KeyError
    extend(root, 0, 1)


def test_a_walk_that_failed_half_way_can_be_repeated() -> None:
    segment = root_segment(5, 2)
    extend(segment, 0, 1)
    segment.write(0, *content(0, 70, 3))  # the second layer fails: nothing is committed
    assert seen(segment, 0) == [0] and segment.length == 1
    extend(segment, 1, 3)
    assert seen(segment, 0) == [0, 1, 2, 3] and seen(segment, 1) == [1000 + i for i in range(4)]


def test_a_prompt_of_one_token_leaves_an_empty_segment() -> None:
    empty = root_segment(0, 4)
    assert empty.resident(0) == [] and empty.nbytes == 0
    with empty.branch(2) as branch:
        extend(branch, 0, 2)
        assert seen(branch, 0) == [0, 1]


def test_bytes_are_those_of_all_layers_without_parents() -> None:
    root = prompt(4, page_tokens=4)
    assert root.nbytes == LAYERS * 2 * 4 * 2 * 4  # layers, k and v, tokens, head dim, bytes
    with root.branch(1) as branch:
        extend(branch, 4, 1)
        assert branch.nbytes == LAYERS * 2 * 1 * 2 * 4


def test_positions_of_a_rank_that_has_all_are_one_run_a_segment() -> None:
    root = root_segment(8, 3)
    for first in (0, 3, 5):
        extend(root, first, 2 if first else 3)
    assert root.runs == [range(7)]
    assert root.before(3).runs == [range(3)]
    with root.branch(2) as response:
        extend(response, 7, 1)
        assert response.runs == [range(7), range(7, 8)]


def test_positions_of_a_rank_that_has_a_share_are_a_run_a_block() -> None:
    segment = Segment([KVPages(4, 3) for _ in range(LAYERS)], 12)
    for own in (slice(0, 2), slice(4, 4), slice(2, 4)):
        for layer in range(LAYERS):
            tokens = segment.stop + own.start, own.stop - own.start
            segment.write(layer, *content(layer, *tokens))
        segment.commit(4, own)
    assert segment.runs == [range(2), range(10, 12)]
    assert seen(segment, 0) == [0, 1, 10, 11]
    assert segment.before(8).runs == segment.before(4).runs == [range(2)]
