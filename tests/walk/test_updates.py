"""Two optimizer steps against ordinary training: stale prompt states, adapters, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from longstraw_backend.compare.distances import gradient_rel_l2
from longstraw_backend.compare.inputs import add_adapters
from longstraw_backend.config import Gradient
from longstraw_backend.groups import Group
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Mode, Objective
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey
from longstraw_backend.walk import BatchRun, GroupWalk, Meter
from tests.walk.cases import HYBRIDS, LATENT, batch, model, theirs, walk

ROWS = [(40, 9), (23, 1), (40, 1), (23, 14)]
MODES: dict[Gradient, Mode] = {"response_only": "detached", "exact": "full"}
gradients = pytest.mark.parametrize("gradient", MODES)


def _train(stock: nn.Module, step: Callable[[int], None], steps: int = 2) -> dict[str, Any]:
    """Parameters after AdamW steps; ``step(version)`` leaves gradients behind."""
    optimizer = torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], lr=1e-3)
    for version in range(steps):
        optimizer.zero_grad(set_to_none=True)
        step(version)
        optimizer.step()
    return {n: p.detach().clone() for n, p in stock.named_parameters() if p.requires_grad}


def _replay(
    one: GroupWalk, groups: Sequence[Group], objective: Objective, version: int, meter: Meter
) -> None:
    run = BatchRun(
        one,
        meter,
        Lockstep(),
        key=lambda group: PromptKey(group.digest, version),
        temperature=lambda row: objective.temperatures[row.index],
        on_row=lambda row, out: objective.loss(row, LogProbs(*out)).backward(),
        entropy=True,
    )
    run.run(groups)


def _both(
    stock: Callable[[], nn.Module], gradient: Gradient = "response_only"
) -> tuple[dict[str, Any], dict[str, Any], Meter]:
    groups, objective = batch(ROWS)
    reference, mode = stock(), MODES[gradient]
    expected = _train(reference, lambda _: void(theirs(reference, groups, objective, mode)))
    trained, meter = stock(), Meter()
    one = walk(trained, gradient=gradient, response_block=6, prompt_block=11)

    def step(version: int) -> None:
        one.store.drop_stale(version)
        assert len(one.store) == 0
        _replay(one, groups, objective, version, meter)

    return _train(trained, step), expected, meter


def void(_: object) -> None:
    """Drop a result."""


@gradients
def test_full_parameters_over_two_steps(gradient: Gradient) -> None:
    found, expected, meter = _both(model, gradient)
    start = dict(model().named_parameters())
    moved = {n: p - start[n].detach() for n, p in found.items()}
    wanted = {n: p - start[n].detach() for n, p in expected.items()}
    assert gradient_rel_l2(found, expected) <= 1e-9
    assert gradient_rel_l2(moved, wanted) <= 1e-6  # of the update itself, not of the weights
    assert meter.prompt_tokens_captured == 2 * (39 + 22)


@gradients
@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS, *LATENT])
def test_adapters_over_two_steps(family: str, gradient: Gradient) -> None:
    def stock() -> nn.Module:
        return add_adapters(model(family), rank=4, seed=3)

    found, expected, _ = _both(stock, gradient)
    start = {n: p.detach() for n, p in stock().named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found)
    assert gradient_rel_l2(found, expected) <= 1e-9
    moved, wanted = ({n: p - start[n] for n, p in x.items()} for x in (found, expected))
    assert gradient_rel_l2(moved, wanted) <= 1e-6


def test_a_stale_state_would_show() -> None:
    groups, objective = batch(ROWS)
    reference = model()
    expected = _train(reference, lambda _: void(theirs(reference, groups, objective)))
    trained = model()
    one, meter = walk(trained), Meter()
    found = _train(trained, lambda _: _replay(one, groups, objective, 0, meter))
    assert meter.prompt_tokens_captured == 39 + 22
    assert gradient_rel_l2(found, expected) > 1e-6


def test_gradients_of_two_batches_add_up() -> None:
    groups, objective = batch(ROWS)
    reference, trained = model(), model()
    for _ in range(2):
        expected = theirs(reference, groups, objective)
    one = walk(trained)
    for _ in range(2):
        _replay(one, groups, objective, 0, Meter())
    found = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert gradient_rel_l2(found, expected.gradients) <= 1e-9
