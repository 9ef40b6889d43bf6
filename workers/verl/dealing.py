"""How groups of rows are dealt out to data-parallel ranks.

verl splits a batch into equal runs of rows, one run a rank, after balancing it row by row; that
tears groups apart, and every rank would then capture every prompt. Dealing whole groups keeps one
capture per prompt. The ranks walk their groups in step (under FSDP each forward is a collective),
so the cost of slot i is the longest group any rank has there: groups of similar size are put side
by side.

Pure functions over (group sizes, number of ranks); rows are named by position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RowGroup", "deal", "imbalance"]


@dataclass(frozen=True)
class RowGroup:
    """Rows that share a prompt: their positions in the batch and their tokens in all."""

    rows: tuple[int, ...]
    tokens: int


def deal(groups: Sequence[RowGroup], num_ranks: int) -> list[list[int]]:
    """Rows of each rank, whole groups where the counts allow, equal row counts always.

    Args:
        groups: in the order in which the trainer should see them.
        num_ranks: data-parallel size; must divide the number of rows.
    Raises:
        ValueError: the rows cannot be split evenly.
    """
    num_rows = sum(len(group.rows) for group in groups)
    if num_ranks < 1 or num_rows % num_ranks:
        raise ValueError(
            f"num_ranks must divide the {num_rows} rows of the batch, got {num_ranks}; choose "
            "data.train_batch_size * rollout.n as a multiple of the data-parallel size"
        )
    if num_ranks == 1:
        return [[row for group in groups for row in group.rows]]
    equal = len({len(group.rows) for group in groups}) == 1
    if equal and len(groups) % num_ranks == 0:
        return _deal_in_layers(groups, num_ranks)
    return _deal_by_room(groups, num_ranks, num_rows // num_ranks)


def _deal_in_layers(groups: Sequence[RowGroup], num_ranks: int) -> list[list[int]]:
    """Slot i of all ranks is one layer of groups of neighbouring size.

    Within a layer the rank with the fewest tokens so far gets the largest group. Layers follow the
    order in which their first group came, not their size: a mini-batch is a run of layers, and one
    optimizer step on all the long prompts would not be the batch the user asked for.
    """
    by_size = sorted(range(len(groups)), key=lambda i: (-groups[i].tokens, i))
    layers = [by_size[i : i + num_ranks] for i in range(0, len(by_size), num_ranks)]
    tokens = [0] * num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for layer in sorted(layers, key=min):
        hungry = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for rank, index in zip(hungry, layer, strict=True):
            tokens[rank] += groups[index].tokens
            ranks[rank].extend(groups[index].rows)
    return ranks


def _deal_by_room(groups: Sequence[RowGroup], num_ranks: int, room: int) -> list[list[int]]:
    """Unequal groups: largest first into the lightest rank that has room; the rest is cut up."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0.0] * num_ranks
    leftover: list[RowGroup] = []
    for group in sorted(groups, key=lambda g: (-g.tokens, g.rows)):
        fits = [r for r in range(num_ranks) if len(ranks[r]) + len(group.rows) <= room]
        if not fits:
            leftover.append(group)
            continue
        rank = min(fits, key=lambda r: (tokens[r], r))
        ranks[rank].extend(group.rows)
        tokens[rank] += group.tokens
    rest = [row for group in leftover for row in group.rows]
    for rows in ranks:
        take = room - len(rows)
        rows.extend(rest[:take])
        del rest[:take]
    return ranks


def imbalance(shares: Sequence[Sequence[int]], row_tokens: Sequence[int]) -> float:
    """Tokens of the heaviest rank over the mean of all ranks; 1.0 is perfect."""
    totals = [sum(row_tokens[row] for row in rows) for rows in shares]
    mean = sum(totals) / len(totals)
    return max(totals) / mean if mean else 1.0
