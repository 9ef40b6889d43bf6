"""Exact gradients: reverse block replay against ordinary autograd over prompt and response."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from longstraw_backend.compare.distances import bitwise_equal, distance, gradient_rel_l2
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.config import Gradient
from longstraw_backend.kernels.segment_attention import api
from longstraw_backend.state import PromptKey
from longstraw_backend.tiny import AVAILABLE
from longstraw_backend.walk import Meter
from tests.walk.cases import (
    HYBRIDS,
    LATENT,
    batch,
    check,
    model,
    one_group,
    ours,
    theirs,
    tokens,
    walk,
)
from tests.walk.test_parity import MIXED

BLOCKS: dict[str, Any] = {"response_block": 5, "prompt_block": 7}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
families = pytest.mark.parametrize("family", AVAILABLE)
kinds = pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm_moe_dsa"])


@dtypes
@families
def test_matches_full_sequence_training(family: str, dtype: torch.dtype) -> None:
    groups, objective = batch(MIXED)
    expected = theirs(model(family, dtype), groups, objective, "full")
    found = ours(model(family, dtype), groups, objective, gradient="exact", **BLOCKS)
    check(found, expected, dtype, family)
    assert found.gradients.keys() == expected.gradients.keys()


@families
def test_blocks_of_responses_do_not_change_their_gradient(family: str) -> None:
    groups, objective = batch(MIXED)
    whole = ours(model(family), groups, objective)
    found = ours(model(family), groups, objective, response_block=4)
    check(found, whole, family=family)
    check(found, theirs(model(family), groups, objective), family=family)


@kinds
@pytest.mark.parametrize("prompt_block", [1, 3, 13, 39, 1000])
def test_prompt_blocks_do_not_matter(family: str, prompt_block: int) -> None:
    groups, objective = one_group(40, [9, 1])
    expected = theirs(model(family), groups, objective, "full")
    options: dict[str, Any] = {"gradient": "exact", "prompt_block": prompt_block}
    check(ours(model(family), groups, objective, **options), expected, family=family)


@kinds
@pytest.mark.parametrize("response_block", [1, 4, 9, 20])
def test_response_blocks_do_not_matter(family: str, response_block: int) -> None:
    groups, objective = one_group(30, [9, 1, 20])
    expected = theirs(model(family), groups, objective, "full")
    options: dict[str, Any] = {"gradient": "exact", "response_block": response_block}
    check(ours(model(family), groups, objective, **options), expected, family=family)


@kinds
@pytest.mark.parametrize("prompt", [1, 2, 4])
def test_short_prompts(family: str, prompt: int) -> None:
    groups, objective = one_group(prompt, [6, 1, 0])
    expected = theirs(model(family), groups, objective, "full")
    check(ours(model(family), groups, objective, gradient="exact"), expected, family=family)


@kinds
def test_gradient_is_not_that_of_response_only(family: str) -> None:
    groups, objective = one_group(30, [9, 4])
    exact = ours(model(family), groups, objective, gradient="exact")
    responses = ours(model(family), groups, objective)
    assert gradient_rel_l2(exact.gradients, responses.gradients) > 0.01
    assert distance(exact, responses).logprob_max_abs == 0


@families
def test_score_equals_replay_bitwise(family: str) -> None:
    groups, objective = batch(MIXED)
    one = walk(model(family, torch.float32), gradient="exact", **BLOCKS)
    before = score_batch(one, groups, objective)
    replayed = replay_batch(one, groups, objective).rows
    assert bitwise_equal(before, replayed)
    assert bitwise_equal(score_batch(one, groups, objective), replayed)


@kinds
def test_activation_checkpointing_is_neutral(family: str) -> None:
    groups, objective = one_group(30, [9, 1])
    plain, recomputed = (
        ours(
            model(family, torch.float32),
            groups,
            objective,
            activation_checkpointing=on,
            gradient="exact",
            **BLOCKS,
        )
        for on in (False, True)
    )
    assert bitwise_equal(plain.rows, recomputed.rows)
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, recomputed.gradients[name]), name


@pytest.mark.parametrize("gradient", get_args(Gradient))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", *LATENT[-1:]])
def test_a_recomputed_layer_attends_only_once(
    family: str, gradient: Gradient, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = api.over_own, [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return forward(*args)

    monkeypatch.setattr(api, "over_own", counted)
    made = []
    for on in (False, True):
        calls[0] = 0
        options: Any = dict(gradient=gradient, activation_checkpointing=on, **BLOCKS)
        ours(model(family, torch.float32), *one_group(30, [9, 1]), **options)
        made.append(calls[0])
    assert made[0] == made[1] > 0


@kinds
@pytest.mark.parametrize("kind", ["attention", "latent", "recurrent"])
def test_state_in_cpu_memory_changes_no_bit(family: str, kind: str) -> None:
    groups, objective = one_group(30, [9, 1])
    here, there = (
        ours(model(family, torch.float32), groups, objective, gradient="exact", host_state=host)
        for host in ((), (kind,))
    )
    for name, gradient in here.gradients.items():
        assert torch.equal(gradient, there.gradients[name]), name


@kinds
def test_a_second_replay_gives_the_same_gradient(family: str) -> None:
    """Cotangents are spent: nothing of the first is left."""
    groups, objective = one_group(30, [9, 4])
    one = walk(model(family), gradient="exact", **BLOCKS)
    first = replay_batch(one, groups, objective).gradients
    kept = {name: g.clone() for name, g in first.items()}
    one.model.module.zero_grad(set_to_none=True)
    again = replay_batch(one, groups, objective).gradients
    assert all(torch.equal(kept[name], g) for name, g in again.items())
    (segment,) = one.store._states.values()
    assert segment.cotangent_nbytes == 0


def test_bfloat16_cotangents_are_close() -> None:
    groups, objective = one_group(40, [9, 4])
    exact = ours(model(dtype=torch.bfloat16), groups, objective, gradient="exact")
    options: dict[str, Any] = {"gradient": "exact", "cotangent_dtype": "bfloat16"}
    narrow = ours(model(dtype=torch.bfloat16), groups, objective, **options)
    assert 0 < gradient_rel_l2(narrow.gradients, exact.gradients) < 0.01


@pytest.mark.parametrize(("response_block", "again"), [(100, 0), (4, 1)])
def test_tokens_run_are_those_of_the_formula(response_block: int, again: int) -> None:
    """Responses longer than a block are run forward once more; the prompt once more as well."""
    groups, objective = one_group(41, [9, 1, 14])
    meter = Meter()
    one = walk(model(), gradient="exact", response_block=response_block)
    replay_batch(one, groups, objective, meter)
    assert meter.prompt_tokens_captured == 40
    assert meter.backward_tokens == 40 + 24
    assert meter.forward_tokens == 40 + 24 + again * (9 + 14)


@pytest.mark.parametrize(
    ("family", "per_token", "constant"),
    [
        ("qwen3", 3 * 2 * 2 * 16, 0),
        ("qwen3_5", 2 * 2 * 16, 2 * (96 * 3 + 4 * 8 * 16)),
        ("glm_moe_dsa", 4 * 24, 0),
    ],
)
def test_cotangents_have_the_bytes_of_the_formula(
    family: str, per_token: int, constant: int
) -> None:
    """Of 333 prompt tokens: as many numbers as pages have, and a state a block but the first."""
    one, meter = walk(model(family, torch.float32), gradient="exact"), Meter()
    groups, objective = one_group(334, [5, 3])
    replay_batch(one, groups, objective, meter)
    assert meter.cotangent_bytes == (333 * per_token + constant) * 4
    segment = one.captured(tokens(334, 334), PromptKey(b"", 0), Meter())
    boundaries = -(-333 // 13)
    index_keys = 3 * 16 if family == "glm_moe_dsa" else 0
    assert segment.nbytes == (333 * (per_token + index_keys) + boundaries * constant) * 4


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
def test_two_prompts_of_one_batch_do_not_mix(family: str) -> None:
    groups, objective = batch([(40, 5), (23, 3), (40, 2)])
    expected = theirs(model(family), groups, objective, "full")
    check(ours(model(family), groups, objective, gradient="exact"), expected, family=family)
