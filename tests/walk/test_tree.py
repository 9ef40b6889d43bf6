"""Which tokens the rows of a group share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longstraw_backend.groups import group_rows
from longstraw_backend.walk.tree import Node, response_tree


def tree(
    responses: Sequence[Sequence[int]],
    shared: int = 2,
    temperatures: Sequence[float] | None = None,
) -> list[Node]:
    prompts = [torch.tensor([5, 9])] * len(responses)
    (group,) = group_rows(prompts, [torch.tensor(r, dtype=torch.long) for r in responses])
    each = temperatures or [1.0] * len(responses)
    return response_tree(group, lambda row: each[row.index], shared)


def shape(nodes: Sequence[Node]) -> list[object]:
    return [
        (n.inputs.tolist(), n.targets.tolist(), [r.index for r in n.rows], shape(n.children))
        for n in nodes
    ]


def test_rows_that_part_at_once_are_leaves() -> None:
    assert shape(tree([[1, 2], [2, 2], []])) == [
        ([9, 1], [1, 2], [0], []),
        ([9, 2], [2, 2], [1], []),
    ]


def test_paths_part_at_the_last_input_in_common() -> None:
    assert shape(tree([[1, 2, 3, 4], [1, 2, 7, 8]])) == [
        ([9, 1], [1, 2], [], [([2, 3], [3, 4], [0], []), ([2, 7], [7, 8], [1], [])])
    ]


def test_a_row_that_ends_inside_another_ends_at_a_node() -> None:
    assert shape(tree([[1, 2], [1, 2, 3], [1, 2]])) == [
        ([9, 1], [1, 2], [0, 2], [([2], [3], [1], [])])
    ]


def test_short_common_beginnings_are_not_shared() -> None:
    assert len(tree([[1, 2, 3, 4], [1, 2, 7, 8]], shared=3)) == 2
    two, alone = tree([[1, 2, 3, 4], [1, 2, 3, 8], [1, 2, 9, 9]], shared=3)
    assert [len(two.children), len(alone.children)] == [2, 0]


def test_rows_of_other_temperatures_share_nothing() -> None:
    assert len(tree([[1, 2, 3]] * 3, temperatures=[1.0, 0.5, 1.0])) == 2


def test_every_row_and_token_is_there_once() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 2, (12,), generator=draw).tolist() for _ in range(40)]
    nodes = tree(rows)
    ended = [row.index for top in nodes for node in top for row in node.rows]
    assert sorted(ended) == list(range(40))
    _follow(nodes, [], rows)
    assert sum(n.inputs.numel() for top in nodes for n in top) < 40 * 12


def _follow(nodes: Sequence[Node], before: list[int], rows: list[list[int]]) -> None:
    for node in nodes:
        path = before + node.targets.tolist()
        assert node.inputs.tolist() == ([9] + path)[len(before) : len(path)]
        assert all(rows[row.index] == path for row in node.rows)
        _follow(node.children, path, rows)
