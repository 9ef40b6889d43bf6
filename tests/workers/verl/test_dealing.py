"""Dealing groups to ranks: whole groups, equal rows, balanced tokens."""

import itertools
import random

import pytest

from longstraw_backend.workers.verl.dealing import RowGroup, deal, imbalance


def make_groups(sizes_and_tokens):
    groups, start = [], 0
    for size, tokens in sizes_and_tokens:
        groups.append(RowGroup(tuple(range(start, start + size)), tokens))
        start += size
    return groups


def row_tokens(groups):
    per_row = {row: g.tokens / len(g.rows) for g in groups for row in g.rows}
    return [per_row[row] for row in sorted(per_row)]


def split_groups(groups, shares):
    """How many groups have rows on more than one rank."""
    rank_of = {row: rank for rank, rows in enumerate(shares) for row in rows}
    return sum(len({rank_of[row] for row in g.rows}) > 1 for g in groups)


def test_one_rank_keeps_the_order():
    assert deal(make_groups([(2, 9), (3, 5)]), 1) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_groups_stay_whole_with_equal_rows(num_ranks):
    groups = make_groups([(4, 10 * i) for i in range(1, 13)])
    shares = deal(groups, num_ranks)
    assert sorted(itertools.chain(*shares)) == list(range(48))
    assert {len(rows) for rows in shares} == {48 // num_ranks}
    assert split_groups(groups, shares) == 0


def test_tokens_are_balanced():
    rng = random.Random(0)
    groups = make_groups([(2, rng.randint(100, 10_000)) for _ in range(32)])
    blind = [list(range(0, 32)), list(range(32, 64))]
    dealt = deal(groups, 2)
    tokens = row_tokens(groups)
    assert imbalance(dealt, tokens) < 1.02
    assert imbalance(dealt, tokens) <= imbalance(blind, tokens)


def test_ranks_meet_similar_groups_in_every_slot():
    groups = make_groups([(1, tokens) for tokens in (5, 900, 7, 1000, 40, 45)])
    tokens = row_tokens(groups)
    for slot in zip(*deal(groups, 2), strict=True):
        assert max(tokens[row] for row in slot) <= 1.5 * min(tokens[row] for row in slot)


def test_layers_follow_the_order_of_arrival_not_the_size():
    groups = make_groups([(1, 10), (1, 10), (1, 99), (1, 99)])
    shares = deal(groups, 2)
    assert [rows[0] for rows in shares] in ([0, 1], [1, 0])


def test_unequal_groups_still_give_equal_rows_and_split_little():
    groups = make_groups([(4, 40), (3, 30), (4, 44), (1, 9)])
    shares = deal(groups, 2)
    assert [len(rows) for rows in shares] == [6, 6]
    assert sorted(itertools.chain(*shares)) == list(range(12))
    assert split_groups(groups, shares) <= 1


def test_group_count_that_does_not_divide_splits_one_group():
    groups = make_groups([(4, 40), (4, 41), (4, 42)])
    shares = deal(groups, 2)
    assert [len(rows) for rows in shares] == [6, 6]
    assert split_groups(groups, shares) == 1


def test_result_depends_on_nothing_but_the_arguments():
    groups = make_groups([(2, i % 3) for i in range(8)])
    assert deal(groups, 4) == deal(groups, 4)


def test_rows_that_cannot_be_split_evenly_are_refused():
    with pytest.raises(ValueError, match="must divide the 3 rows"):
        deal(make_groups([(3, 1)]), 2)
