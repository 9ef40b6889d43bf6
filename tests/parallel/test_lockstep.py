"""Ranks that agree: alone, and as two or three processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longstraw_backend.parallel import Lockstep
from tests.ranks import run_ranks

COUNTS: list[list[int]] = [[3, 1], [2, 5, 4], []]


def test_a_single_rank_counts_for_itself() -> None:
    alone = Lockstep()
    assert alone.most([3, 1]) == [3, 1]
    assert alone.most([]) == []


def test_a_single_rank_keeps_its_message_and_its_tokens() -> None:
    alone = Lockstep()
    with alone.agree():
        pass
    with pytest.raises(ValueError, match=r"^prompts\[0\]: bad$"), alone.agree():
        raise ValueError("prompts[0]: bad")
    tokens = torch.tensor([4, 2])
    assert alone.same_tokens(tokens) is tokens


def test_a_single_rank_lets_other_errors_through() -> None:
    with pytest.raises(KeyError), Lockstep().agree():
        raise KeyError("x")


def caught(lockstep: Lockstep, message: str | None) -> str | None:
    try:
        with lockstep.agree():
            if message is not None:
                raise ValueError(message)
    except ValueError as error:
        return str(error)
    return None


def all_together(rank: int) -> dict[str, Any]:
    lockstep = Lockstep(dist.group.WORLD)
    last = dist.get_world_size() - 1
    return {
        "most": lockstep.most(COUNTS[rank]),
        "none": lockstep.most([]),
        "sum": lockstep.summed([rank, 0.5]),
        "fine": caught(lockstep, None),
        "one": caught(lockstep, "rows: bad" if rank == last else None),
        "all": caught(lockstep, f"rank {rank}: bad"),
        "after": lockstep.most([rank]),
        "tokens": lockstep.same_tokens(torch.tensor([10 * rank, rank])).tolist(),
    }


def agreed(world: int) -> dict[str, Any]:
    return {
        "most": [3, 5, 4],
        "none": [],
        "sum": [sum(range(world)), 0.5 * world],
        "fine": None,
        "one": f"rows: bad (found on rank {world - 1} of the group)",
        "all": "rank 0: bad (found on rank 0 of the group)",
        "after": [world - 1],
        "tokens": [0, 0],
    }


def test_two_ranks_agree(tmp_path: Path) -> None:
    assert run_ranks(all_together, 2, tmp_path) == [agreed(2)] * 2


def in_groups(rank: int) -> dict[str, Any]:
    """Rank 0 alone, ranks 1 and 2 together: ranks are numbered within the group."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    lockstep = Lockstep(groups[min(rank, 1)])
    return {
        "most": lockstep.most([rank]),
        "error": caught(lockstep, "bad" if rank == 2 else None),
        "tokens": lockstep.same_tokens(torch.tensor([rank])).item(),
    }


def all_and_in_groups(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return all_together(rank), in_groups(rank)


def test_three_ranks_agree_and_so_do_the_ranks_of_a_group(tmp_path: Path) -> None:
    whole, parts = zip(*run_ranks(all_and_in_groups, 3, tmp_path), strict=True)
    assert list(whole) == [agreed(3)] * 3
    pair = {"most": [2], "error": "bad (found on rank 1 of the group)", "tokens": 1}
    assert list(parts) == [{"most": [0], "error": None, "tokens": 0}, pair, pair]
