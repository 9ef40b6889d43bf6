"""Ranks that share prompts: one rank's numbers, a share of its state each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longstraw_backend.compare.distances import bitwise_equal, gradient_rel_l2
from longstraw_backend.compare.settings import DELTA_NET_GRADIENT_BAR
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.config import Gradient
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Outcome
from longstraw_backend.parallel import Lockstep
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.state import PromptKey
from longstraw_backend.walk import GroupWalk, Meter, Sampling, generate
from tests.ranks import run_ranks
from tests.walk.cases import HYBRIDS, batch, check, model, ours, tokens, walk
from tests.walk.test_parity import MIXED

FAMILIES = ("llama", "qwen3_moe", "glm_moe_dsa", "deepseek_v3", "qwen3_5")
GRADIENTS: tuple[Gradient, ...] = ("response_only", "exact")
BLOCKS: dict[str, Any] = {"response_block": 5, "prompt_block": 7, "chunk_tokens": 7}
WAVES: dict[str, Any] = BLOCKS | {"response_block": 9, "replay_tokens": 27}
"""Three rows of 9, 1 and 4 tokens; and a single token beside a response of two blocks."""


def _shared(family: str, **options: Any) -> GroupWalk:
    one = walk(model(family), **options)
    return replace(one, model=replace(one.model, ranks=Ranks.of(dist.group.WORLD)))


def _summed(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name in sorted(gradients):
        dist.all_reduce(gradients[name])
    return gradients


def _replayed(family: str, gradient: Gradient, **options: Any) -> tuple[Outcome, bool, int]:
    one = _shared(family, gradient=gradient, **options)
    groups, objective = batch(MIXED)
    scored = score_batch(one, groups, objective)
    found = replay_batch(one, groups, objective)
    summed = Outcome(found.loss, found.rows, _summed(found.gradients))
    return summed, bitwise_equal(scored, found.rows), one.store.nbytes


def _decoded(family: str) -> list[int]:
    one, key = _shared(family, **BLOCKS), PromptKey(b"", 0)
    sampling = Sampling(max_new_tokens=8, temperature=0)
    lockstep = Lockstep(dist.group.WORLD)
    (sample,) = generate(one, tokens(37, 5), lambda _: key, [sampling], 0, Meter(), lockstep)
    return sample.token_ids


CASES: dict[int, list[tuple[str, Gradient, bool]]] = {
    2: [(family, gradient, False) for family in FAMILIES for gradient in GRADIENTS]
    + [(family, "exact", True) for family in FAMILIES],
    4: [(family, "exact", False) for family in ("qwen3_moe", "glm_moe_dsa", "qwen3_5")],
}
"""By number of ranks: family, gradient, and whether short responses share passes. Starting ranks,
and four on two cores, takes longer than what they do."""


def _everything(rank: int) -> dict[Any, Any]:
    cases = CASES[dist.get_world_size()]
    found: dict[Any, Any] = {family: _decoded(family) for family, *_ in cases}
    for family, gradient, waves in cases:
        options = WAVES if waves else BLOCKS
        outcome, bitwise, nbytes = _replayed(family, gradient, **options)
        rows = {i: tuple(r) for i, r in outcome.rows.items()}
        found[family, gradient, waves] = outcome.loss, rows, outcome.gradients, bitwise, nbytes
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    return {w: run_ranks(_everything, w, tmp_path_factory.mktemp("ranks")) for w in CASES}


@pytest.mark.parametrize(
    ("world", "family", "gradient", "waves"),
    [(w, *case) for w, cases in CASES.items() for case in cases],
)
def test_numbers_are_those_of_one_rank(
    results: dict[int, list[dict[Any, Any]]],
    world: int,
    family: str,
    gradient: Gradient,
    waves: bool,
) -> None:
    expected = ours(model(family), *batch(MIXED), gradient=gradient, **BLOCKS)
    for result in results[world]:
        loss, rows, gradients, bitwise, _ = result[family, gradient, waves]
        found = Outcome(loss, {i: LogProbs(*r) for i, r in rows.items()}, gradients)
        check(found, expected, family=family)
        bar = DELTA_NET_GRADIENT_BAR if family in HYBRIDS else 1e-10
        assert gradient_rel_l2(gradients, expected.gradients) <= bar
        assert bitwise


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(HYBRIDS)))
def test_state_is_shared_out(results: dict[int, list[dict[Any, Any]]], family: str) -> None:
    one = walk(model(family), **BLOCKS)
    score_batch(one, *batch(MIXED))
    held = [result[family, "response_only", False][4] for result in results[2]]
    assert sum(held) == one.store.nbytes
    per_token = one.store.nbytes / (39 + 22)
    blocks = 6 + 4
    assert max(held) - min(held) <= 4 * blocks * per_token  # the last run of a block may be short


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_that_of_one_rank(
    results: dict[int, list[dict[Any, Any]]], family: str
) -> None:
    one, key = walk(model(family), **BLOCKS), PromptKey(b"", 0)
    sampling = Sampling(max_new_tokens=8, temperature=0)
    (sample,) = generate(one, tokens(37, 5), lambda _: key, [sampling], 0, Meter(), Lockstep())
    assert all(result[family] == sample.token_ids for result in results[2])
