"""Orders of passes that ranks with different work can all follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from longstraw_backend.walk.pace import Pace, Pass, run_lengths

S, R, P = Pass


@pytest.mark.parametrize(
    ("passes", "runs"),
    [
        ([], []),
        ([S], [1, 0, 0]),
        ([R, R], [0, 2, 0]),
        ([S, R, R, P], [1, 2, 1]),
        ([S, R, S, R, P], [1, 1, 0, 1, 1, 1]),
        ([P, S, P], [0, 0, 1, 1, 0, 1]),
    ],
)
def test_run_lengths(passes: list[Pass], runs: list[int]) -> None:
    assert run_lengths(passes) == runs


def _made(own: Sequence[Pass], runs: Sequence[int], last: list[bool]) -> list[Pass]:
    """What a rank calls, idle passes included."""
    made: list[Pass] = []

    def around(final: bool) -> nullcontext[None]:
        last.append(final)
        return nullcontext()

    backwards = sum(n for i, n in enumerate(runs) if i % len(Pass))
    pace = Pace(made.append, around, backwards)
    pace.begin(runs)
    for kind in own:
        with pace.turn(kind):
            made.append(kind)
    pace.finish()
    return made


def test_ranks_make_the_same_calls_in_the_same_order() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks = [draw.choices(list(Pass), k=draw.randrange(12)) for _ in range(3)]
        own = [run_lengths(passes) for passes in ranks]
        width = max(map(len, own))
        runs = [max(r[i] if i < len(r) else 0 for r in own) for i in range(width)]
        last: list[list[bool]] = [[], [], []]
        made = [_made(*args) for args in zip(ranks, [runs] * 3, last, strict=True)]
        assert made[0] == made[1] == made[2]
        assert len(made[0]) == sum(runs)
        assert last[0] == last[1] == last[2]
        assert all(flag is (i == len(last[0]) - 1) for i, flag in enumerate(last[0]))


def test_alone_there_are_no_idle_passes() -> None:
    own = [S, R, S, S, R, R, P]
    assert _made(own, run_lengths(own), []) == own
