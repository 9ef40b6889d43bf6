"""Waves: short responses of a group as rows of one pass, equal to ordinary autograd row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw_backend.compare.distances import bitwise_equal
from longstraw_backend.compare.inputs import add_adapters
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.config import Gradient, LongStrawConfig
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Mode
from longstraw_backend.walk import GroupWalk, Meter
from longstraw_backend.walk.responses import passes_of
from longstraw_backend.walk.tree import Node, response_tree
from longstraw_backend.walk.waves import num_tokens, padded, rows_of, waves
from tests.walk.cases import batch, check, model, one_group, ours, theirs, tokens, walk
from tests.walk.test_turns import SHARED, three_turns

LENGTHS = [9, 1, 4, 0, 7, 7, 2]
"""Of one group; with 21 tokens a wave [9, 1], [4, 7, 7] and [2]."""
TOGETHER = [[9, 1], [4, 7, 7], [2]]
RAGGED = [(40, length) for length in LENGTHS] + [(23, 1), (23, 10)]
MODES: dict[Gradient, Mode] = {"response_only": "detached", "exact": "full"}
gradients = pytest.mark.parametrize("gradient", MODES)
families = pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "qwen3_5", "glm_moe_dsa", "deepseek_v3"]
)


def _nodes(lengths: list[int], temperatures: list[float] | None = None) -> list[Node]:
    each = temperatures or [1.0] * len(lengths)
    pairs = zip(lengths, each, strict=True)
    return [Node(tokens(n, 1), tokens(n, 2), temperature) for n, temperature in pairs]


def _together(nodes: list[Node], **options: Any) -> list[list[int]]:
    found = waves(nodes, LongStrawConfig(**options))
    return [[node.inputs.numel() for node in wave] for wave in found]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, [[9], [1], [4], [7], [7], [2]]),
        (1, [[9], [1], [4], [7], [7], [2]]),
        (18, [[9, 1], [4, 7], [7, 2]]),
        (21, TOGETHER),
        (1000, [[9, 1, 4, 7, 7, 2]]),
    ],
)
def test_waves_are_as_long_as_they_may_be(budget: int | None, expected: list[list[int]]) -> None:
    nodes = _nodes([9, 1, 4, 7, 7, 2])
    assert _together(nodes, replay_tokens=budget) == expected
    assert [node for wave in waves(nodes, LongStrawConfig()) for node in wave] == nodes


def test_inner_nodes_and_other_temperatures_end_a_wave() -> None:
    nodes = _nodes([3, 3, 9, 3, 3, 3], [1.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    assert _together(nodes, replay_tokens=99, response_block=8) == [[3, 3], [9], [3], [3, 3]]
    nodes[1].children = _nodes([1, 1])
    assert _together(nodes[:3], replay_tokens=99) == [[3], [3], [9]]


def test_rows_are_filled_up_and_taken_out_again() -> None:
    wave = _nodes([3, 1, 2])
    inputs, targets = padded(wave)
    assert inputs.shape == targets.shape == (3, 3)
    assert num_tokens(wave) == 9
    assert not inputs[1, 1:].any() and not targets[2, 2:].any()
    for node, row in zip(wave, rows_of(LogProbs(inputs, targets), wave), strict=True):
        assert torch.equal(row.log_probs, node.inputs) and torch.equal(row.entropy, node.targets)


@gradients
@families
def test_matches_ordinary_training(family: str, gradient: Gradient) -> None:
    groups, objective = batch(RAGGED)
    expected = theirs(model(family), groups, objective, MODES[gradient])
    options: dict[str, Any] = {"gradient": gradient, "prompt_block": 7}
    found = ours(model(family), groups, objective, replay_tokens=21, **options)
    check(found, expected, family=family)
    assert found.gradients.keys() == expected.gradients.keys()


@pytest.mark.parametrize("budget", [1, 18, 1000])
def test_sizes_of_waves_do_not_matter(budget: int) -> None:
    groups, objective = batch(RAGGED, temperatures=[1.0] * 5 + [0.7] * 4)
    expected = theirs(model(), groups, objective, "full")
    check(ours(model(), groups, objective, gradient="exact", replay_tokens=budget), expected)


@gradients
@pytest.mark.parametrize("family", ["qwen3_5", "glm_moe_dsa"])
def test_waves_beside_and_below_inner_nodes(family: str, gradient: Gradient) -> None:
    groups, objective = three_turns()
    expected = theirs(model(family), groups, objective, MODES[gradient])
    # nodes of last turns have 16 to 9 tokens: half of them have two blocks
    options: dict[str, Any] = {"shared_tokens": SHARED, "response_block": 12, "replay_tokens": 24}
    found = ours(model(family), groups, objective, gradient=gradient, **options)
    check(found, expected, family=family)


def test_adapters_get_the_gradient_of_all_rows() -> None:
    groups, objective = batch(RAGGED)
    expected = theirs(add_adapters(model("qwen3_moe"), 4, 0), groups, objective, "full")
    stock = add_adapters(model("qwen3_moe"), 4, 0)
    found = ours(stock, groups, objective, gradient="exact", replay_tokens=21)
    check(found, expected)
    assert any("lora_A" in name and g.abs().max() > 0 for name, g in found.gradients.items())


@families
def test_score_equals_replay_bitwise(family: str) -> None:
    groups, objective = batch(RAGGED)
    options: dict[str, Any] = {"replay_tokens": 21, "response_block": 9, "gradient": "exact"}
    one = walk(model(family, torch.float32), activation_checkpointing=True, **options)
    scored = score_batch(one, groups, objective)
    assert bitwise_equal(scored, replay_batch(one, groups, objective).rows)
    assert bitwise_equal(score_batch(one, groups, objective), scored)


def _passes(one: GroupWalk, run: Any) -> list[tuple[int, int]]:
    """Rows and tokens of every call of the model."""
    seen: list[tuple[int, int]] = []

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    hook = one.model.module.register_forward_pre_hook(count, with_kwargs=True)
    run()
    hook.remove()
    return seen


@pytest.mark.parametrize("grad", [False, True])
def test_there_are_fewer_passes_as_planned(grad: bool) -> None:
    groups, objective = one_group(40, LENGTHS)
    one, meter = walk(model(), replay_tokens=21), Meter()
    score_batch(one, groups, objective)  # captures

    def run() -> None:
        if grad:
            replay_batch(one, groups, objective, meter)
        else:
            score_batch(one, groups, objective)

    found = _passes(one, run)
    assert found == [(2, 9), (3, 7), (1, 2)]
    tree = response_tree(groups[0], lambda _: 1.0, one.config.shared_tokens)
    plan = list(passes_of(tree, 40, one.config, grad=grad))
    assert [tokens for _, tokens in plan] == [rows * longest for rows, longest in found]
    if grad:
        assert meter.graph_tokens_peak == 21
        assert meter.forward_tokens == meter.backward_tokens == 18 + 21 + 2


def test_rows_come_once_and_in_order() -> None:
    groups, objective = one_group(40, LENGTHS)
    alone = replay_batch(walk(model()), groups, objective).rows
    together = replay_batch(walk(model(), replay_tokens=21), groups, objective).rows
    assert list(together) == list(alone)
    assert [row.log_probs.shape for row in together.values()] == [
        row.log_probs.shape for row in alone.values()
    ]
