"""Log-probs and gradients of the walk against ordinary autograd with the prompt state detached."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from longstraw_backend.compare.distances import bitwise_equal, distance
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.tiny import AVAILABLE
from tests.walk.cases import HYBRIDS, LATENT, batch, check, model, one_group, ours, theirs, walk

MIXED = [(40, 9), (23, 1), (40, 1), (23, 14), (40, 0), (40, 4)]
"""Two prompts, rows in mixed order, ragged, with one-token and empty responses."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("family", AVAILABLE)
def test_matches_detached_prompt(family: str, dtype: torch.dtype) -> None:
    groups, objective = batch(MIXED)
    expected = theirs(model(family, dtype), groups, objective)
    check(ours(model(family, dtype), groups, objective), expected, dtype, family)


@pytest.mark.parametrize("family", AVAILABLE)
def test_score_equals_replay_bitwise(family: str) -> None:
    groups, objective = batch(MIXED)
    one = walk(model(family, torch.float32))
    before = score_batch(one, groups, objective)
    replayed = replay_batch(one, groups, objective).rows
    assert bitwise_equal(before, replayed)
    assert bitwise_equal(score_batch(one, groups, objective), replayed)


def test_gradient_is_not_that_of_full_sequence_training() -> None:
    groups, objective = batch(MIXED)
    full = theirs(model(), groups, objective, "full")
    apart = distance(ours(model(), groups, objective), full)
    assert apart.logprob_max_abs <= 1e-9
    assert apart.grad_rel_l2 > 0.01


@pytest.mark.parametrize("prompt", [1, 2])
def test_short_prompts(prompt: int) -> None:
    groups, objective = one_group(prompt, [6, 1, 0])
    expected = theirs(model(), groups, objective)
    check(ours(model(), groups, objective), expected)


def test_prompt_of_one_token_is_full_sequence_training() -> None:
    groups, objective = one_group(1, [6, 1])
    expected = theirs(model(), groups, objective, "full")
    check(ours(model(), groups, objective), expected)


def test_batch_of_empty_responses_changes_nothing() -> None:
    groups, objective = one_group(9, [0, 0])
    found = ours(model(), groups, objective)
    assert found.gradients == {}
    assert [found.rows[i].log_probs.numel() for i in (0, 1)] == [0, 0]


@pytest.mark.parametrize(
    ("chunk", "page"), [(1, 7), (7, 64), (16, 16), (39, 39), (40, 1000), (1000, 5)]
)
def test_chunks_and_pages_do_not_matter(chunk: int, page: int) -> None:
    groups, objective = one_group(40, [9, 1, 4])
    expected = theirs(model(), groups, objective)
    check(ours(model(), groups, objective, chunk_tokens=chunk, page_tokens=page), expected)


@pytest.mark.parametrize("head_chunk", [1, 5, 64])
def test_head_chunks_do_not_matter(head_chunk: int) -> None:
    groups, objective = one_group(20, [9, 1])
    expected = theirs(model(), groups, objective)
    check(ours(model(), groups, objective, head_chunk_tokens=head_chunk), expected)


def test_temperature_per_row() -> None:
    groups, objective = batch([(30, 5), (30, 5), (30, 8)], temperatures=[0.3, 1.0, 2.5])
    expected = theirs(model(), groups, objective)
    check(ours(model(), groups, objective), expected)
    flat = ours(model(), *batch([(30, 5), (30, 5), (30, 8)]))
    assert not torch.allclose(flat.rows[0].log_probs, expected.rows[0].log_probs)
    assert torch.allclose(flat.rows[1].log_probs, expected.rows[1].log_probs, atol=1e-12)


def test_entropy_term_alone() -> None:
    groups, objective = batch([(30, 5), (30, 8)], entropy_coeff=1.0)
    only = replace(objective, weights=[w * 0 for w in objective.weights])
    expected = theirs(model(), groups, only)
    assert expected.loss < -0.1
    check(ours(model(), groups, only), expected)


def test_rows_without_entropy() -> None:
    groups, objective = batch([(30, 5), (30, 8)], entropy_coeff=0.0)
    expected = theirs(model(), groups, objective)
    found = ours(model(), groups, objective)
    check(found, expected)
    assert float(found.rows[0].entropy.abs().max()) == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", *HYBRIDS, *LATENT])
def test_activation_checkpointing_is_bitwise_neutral(family: str) -> None:
    groups, objective = one_group(30, [9, 1])
    plain, recomputed = (
        ours(model(family, torch.float32), groups, objective, activation_checkpointing=on)
        for on in (False, True)
    )
    assert bitwise_equal(plain.rows, recomputed.rows)
    assert plain.gradients.keys() == recomputed.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, recomputed.gradients[name]), name


def test_tied_embeddings() -> None:
    groups, objective = one_group(30, [9, 1])
    expected = theirs(model(tie_word_embeddings=True), groups, objective)
    check(ours(model(tie_word_embeddings=True), groups, objective), expected)


def test_order_of_rows_does_not_matter() -> None:
    groups, objective = batch(MIXED)
    backwards = [copy.copy(g) for g in reversed(groups)]
    for group in backwards:
        group.rows = list(reversed(group.rows))
    check(ours(model(), backwards, objective), ours(model(), groups, objective))
