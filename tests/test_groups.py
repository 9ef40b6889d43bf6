"""Rows to groups: equal token ids alone make a group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import permutations

import pytest
import torch
from torch import Tensor

from longstraw_backend.groups import Group, group_rows, prompt_digest


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


A, B, C = ids(5, 6, 7), ids(5, 6, 8), ids(9)


def grouped(
    prompts: Sequence[Tensor], uids: Sequence[Hashable] | None = None
) -> list[tuple[list[int], list[int]]]:
    """(prompt, row indices) of each group; row i's response is [i]."""
    groups = group_rows(prompts, [ids(i) for i in range(len(prompts))], uids)
    for group in groups:
        assert [row.response.tolist() for row in group.rows] == [[row.index] for row in group.rows]
        assert group.digest == prompt_digest(group.prompt)
    return [(group.prompt.tolist(), [row.index for row in group.rows]) for group in groups]


def test_groups_and_rows_keep_the_order_of_first_appearance() -> None:
    assert grouped([B, A, B, C, A]) == [
        ([5, 6, 8], [0, 2]),
        ([5, 6, 7], [1, 4]),
        ([9], [3]),
    ]


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("with_uids", [False, True])
def test_any_order_of_rows_gives_the_same_groups(order: tuple[int, ...], with_uids: bool) -> None:
    rows = [(A, "a"), (B, "b"), (A, "a"), (B, "b")]
    prompts = [rows[i][0].clone() for i in order]
    found = grouped(prompts, [rows[i][1] for i in order] if with_uids else None)
    assert {tuple(p): sorted(order[i] for i in at) for p, at in found} == {
        (5, 6, 7): [0, 2],
        (5, 6, 8): [1, 3],
    }


EXPECTED = [([5, 6, 7], [0, 1, 3]), ([5, 6, 8], [2, 4])]


@pytest.mark.parametrize(
    "uids",
    [
        ["a", "a", "b", "a", "b"],
        ["p", "q", "r", "s", "t"],  # one prompt under several identifiers
        ["x"] * 5,  # one identifier for all
        ["a", "b", "a", "b", "a"],  # crossed
        [None, None, None, "a", "b"],
        [0, 0.0, False, 1, True],  # equal and hashing alike
    ],
)
def test_identifiers_never_decide(uids: list[Hashable]) -> None:
    assert grouped([A, A.clone(), B, A.clone(), B.clone()], uids) == EXPECTED


def test_a_prompt_that_begins_another_is_a_group_of_its_own() -> None:
    found = grouped([ids(1, 2), ids(1, 2, 0), ids(1, 2)], ["u", "u", "u"])
    assert found == [([1, 2], [0, 2]), ([1, 2, 0], [1])]


def test_an_identifier_spares_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(prompt: Tensor) -> bytes:
        hashed.append(prompt.numel())
        return prompt_digest(prompt)

    monkeypatch.setattr("longstraw_backend.groups.prompt_digest", counting)
    grouped([A.clone() for _ in range(8)], ["u"] * 8)
    assert hashed == [3]


def test_prompts_of_one_token_and_empty_responses_are_rows_like_others() -> None:
    (group,) = group_rows([C, C, C], [ids(), ids(1), ids()])
    assert [row.response.numel() for row in group.rows] == [0, 1, 0]


def test_padding_rows_join_the_group_they_copy() -> None:
    # Hosts fill a batch up with copies of its rows, which have no response or no loss.
    groups = group_rows([A, B, A, A], [ids(1), ids(2), ids(), ids(1)], ["a", "b", "pad", "pad"])
    assert [[row.index for row in group.rows] for group in groups] == [[0, 2, 3], [1]]


def test_no_rows() -> None:
    assert group_rows([], []) == []
    assert group_rows([], [], []) == []


@pytest.mark.parametrize("bad", [ids(), torch.ones(2, 3, dtype=torch.int64)])
def test_rejects_a_prompt_without_tokens(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token, got shape"):
        group_rows([A, bad], [ids(1), ids(2)])


@pytest.mark.parametrize(
    ("prompts", "responses", "uids"),
    [([A], [], None), ([A], [ids(1), ids(2)], None), ([A], [ids(1)], []), ([A], [ids(1)], [1, 2])],
)
def test_rejects_lists_of_different_lengths(
    prompts: list[Tensor], responses: list[Tensor], uids: list[Hashable] | None
) -> None:
    with pytest.raises(ValueError, match="expected one of each per row, got"):
        group_rows(prompts, responses, uids)


def test_digest_depends_on_tokens_alone() -> None:
    strided = torch.stack([A, A], dim=1)[:, 0]
    assert prompt_digest(strided) == prompt_digest(A) == prompt_digest(A.int())
    assert prompt_digest(A) != prompt_digest(B)
    assert prompt_digest(ids(0)) != prompt_digest(ids(0, 0))
    assert len(prompt_digest(A)) == 16


def test_groups_do_not_share_their_rows() -> None:
    assert Group(A, b"").rows is not Group(A, b"").rows
