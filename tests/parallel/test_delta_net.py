"""Gated-delta-net layers over ranks give what one rank gives: outputs, states and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.models.delta_by_head import own_heads, run_by_head
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.wide import StaysWide
from tests.parallel.delta_net_cases import (
    BY_HEAD,
    BY_POSITION,
    Case,
    Result,
    all_by_head,
    all_by_position,
    cases,
    inputs,
    on_one_rank,
    own_state,
)
from tests.ranks import run_ranks


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def check(case: Case, found: list[Result], own: Callable[..., Any]) -> None:
    """Results of all ranks against those of one, whose state ``own`` cuts as the ranks do."""
    world = len(found)
    outs, after, gradients = on_one_rank(case, world)
    for block, (expected, (_, real)) in enumerate(zip(outs, case.blocks, strict=True)):
        runs = torch.cat([result[0][block] for result in found], dim=1)
        close(runs[:, :real], expected, f"{case}, output of block {block}")
    heads = inputs(case, world).heads
    for rank, (_, state, _) in enumerate(found):
        for name, x, y in zip(state._fields, state, own(heads, after, rank, world), strict=True):
            close(x, y, f"{case}, {name} of rank {rank}")
    for name, gradient in gradients.items():
        parts = torch.stack([result[2][name] for result in found])
        close(parts.sum(0), gradient, f"{case}, gradient of {name}")


@pytest.mark.parametrize("world", [2, 4])
def test_heads_over_ranks(world: int, tmp_path: Any) -> None:
    by_case = zip(*run_ranks(all_by_head, world, tmp_path), strict=True)
    for case, found in zip(cases(world, BY_HEAD), by_case, strict=True):
        check(case, list(found), lambda h, s, rank, size: own_state(h, s, Ranks(None, rank, size)))


@pytest.mark.parametrize("world", [2, 4])
def test_positions_over_ranks(world: int, tmp_path: Any) -> None:
    by_case = zip(*run_ranks(all_by_position, world, tmp_path), strict=True)
    for case, found in zip(cases(world, BY_POSITION), by_case, strict=True):
        check(case, list(found), lambda heads, state, *_: state)
        states = [state for _, state, _ in found]
        assert all(torch.equal(x, xs[0]) for xs in zip(*states, strict=True) for x in xs)


def test_a_rank_alone_computes_what_the_layer_does() -> None:
    x = inputs(Case("qwen3_5", 2, 4, ((9, 9),)), 1)
    columns, b, a = torch.randn(2, 9, 96).double(), *torch.randn(2, 2, 9, 4).double()
    with StaysWide():
        out, after = run_by_head(x.heads, columns, b, a, x.before, Ranks(), 7)
        expected = x.heads.run(columns[:, :7], b[:, :7], a[:, :7], x.before)
    assert after is not None and expected[1] is not None and not out[:, 7:].any()
    for one, other in zip((out[:, :7], *after), (expected[0], *expected[1]), strict=True):
        close(one, other, "alone")
    assert run_by_head(x.heads, columns, b, a, x.before, Ranks(), 9, final_state=False)[1] is None


@pytest.mark.parametrize("size", [3, 8])
def test_refuses_heads_that_ranks_cannot_share(size: int) -> None:
    heads = inputs(Case("qwen3_5", 2, 4, ((1, 1),)), 1).heads
    with pytest.raises(ValueError, match=f"ranks: expected a divisor of 2 .* got {size}; use"):
        own_heads(heads, Ranks(None, 0, size))


@pytest.mark.parametrize("real", [0, 10])
def test_refuses_other_numbers_of_real_tokens(real: int) -> None:
    x = inputs(Case("qwen3_5", 2, 4, ((9, 9),)), 1)
    columns, gate = torch.zeros(2, 9, 96).double(), torch.zeros(2, 9, 4).double()
    with pytest.raises(ValueError, match=f"real: expected 1 to 9, .* got {real}"):
        run_by_head(x.heads, columns, gate, gate, x.before, Ranks(), real)


def test_refuses_the_state_of_other_heads() -> None:
    x = inputs(Case("qwen3_5", 2, 4, ((1, 1),)), 1)
    columns, gate = torch.zeros(2, 1, 96).double(), torch.zeros(2, 1, 4).double()
    with pytest.raises(
        ValueError, match=r"before\.conv: expected \[2, 48, 3\] .* got \[2, 96, 3\]"
    ):
        run_by_head(x.heads, columns, gate, gate, x.before, Ranks(None, 1, 2), 2)
