"""Rows that share turns: a tree run once equals its rows run one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.compare.distances import bitwise_equal
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.config import Gradient
from longstraw_backend.groups import Group, group_rows
from longstraw_backend.oracle import Objective
from longstraw_backend.walk import Meter
from tests.walk.cases import check, model, ours, theirs, tokens, walk

PROMPT, TURN, SHARED = 30, 12, 6
gradients = pytest.mark.parametrize("gradient", ["response_only", "exact"])
families = pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm_moe_dsa", "qwen3_moe"])


def three_turns() -> tuple[list[Group], Objective]:
    """Eight rows of three turns, each turn an answer and an observation, which has no weight: two
    first turns, two second ones after each, two third ones after each; lengths differ."""

    def turn(number: int, seed: int) -> Tensor:
        return tokens(TURN + number, seed=100 * number + seed)

    rows = [
        torch.cat([turn(1, r // 4), turn(2, r // 2), turn(3, r)[: TURN + 3 - r]]) for r in range(8)
    ]
    draw = torch.Generator().manual_seed(7)
    weights = [torch.randn(r.numel(), generator=draw, dtype=torch.float64) for r in rows]
    for w in weights:
        w[TURN - 4 : TURN + 1] = 0.0
    prompts = [tokens(PROMPT, seed=1)] * 8
    return group_rows(prompts, rows), Objective(weights, [1.0] * 8, 0.03)


@gradients
@families
def test_a_tree_gives_the_gradient_of_its_rows(family: str, gradient: Gradient) -> None:
    groups, objective = three_turns()
    mode = "full" if gradient == "exact" else "detached"
    expected = theirs(model(family), groups, objective, mode)  # type: ignore[arg-type]
    options: dict[str, Any] = {"gradient": gradient, "response_block": 8}
    apart = ours(model(family), groups, objective, shared_tokens=1000, **options)
    shared = ours(model(family), groups, objective, shared_tokens=SHARED, **options)
    check(apart, expected, family=family)
    check(shared, expected, family=family)


@gradients
def test_tokens_are_run_once_a_node(gradient: Gradient) -> None:
    groups, objective = three_turns()
    counted = {}
    for shared in (1000, SHARED):
        counted[shared] = Meter()
        one = walk(model(), gradient=gradient, shared_tokens=shared)
        replay_batch(one, groups, objective, counted[shared])
    total = sum(row.response.numel() for row in groups[0].rows)
    first, second = TURN + 1, TURN + 2
    # a path ends one token before its children's texts part, which they run again
    once = 2 * (first - 0) + 4 * second + (total - 8 * (first + second))
    prompt = PROMPT - 1 if gradient == "exact" else 0
    assert counted[1000].backward_tokens == total + prompt
    assert counted[SHARED].backward_tokens == once + prompt


def test_score_equals_replay_bitwise() -> None:
    groups, objective = three_turns()
    one = walk(model(dtype=torch.float32), shared_tokens=SHARED, response_block=8)
    scored = score_batch(one, groups, objective)
    assert bitwise_equal(scored, replay_batch(one, groups, objective).rows)


def test_rows_that_are_the_same_count_twice() -> None:
    groups, objective = three_turns()
    twice = [Group(g.prompt, g.digest, [*g.rows, replace(g.rows[0], index=8)]) for g in groups]
    weights = [*objective.weights, -0.5 * objective.weights[0] + 1]
    both = Objective(weights, [1.0] * 9, 0.03)
    expected = theirs(model(), twice, both, "full")
    check(ours(model(), twice, both, gradient="exact", shared_tokens=SHARED), expected)
