"""Two ranks with different work under FSDP2: no hang, and the gradients of one rank."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from longstraw_backend.compare.distances import gradient_rel_l2
from longstraw_backend.compare.settings import DELTA_NET_GRADIENT_BAR
from longstraw_backend.compare.sides import driven, walk_of
from longstraw_backend.config import Gradient, LongStrawConfig
from longstraw_backend.groups import Group, Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Mode, Objective, gradients_of
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey
from longstraw_backend.walk import BatchRun, GroupWalk, Meter, Sampling, generate
from tests.ranks import run_ranks
from tests.walk.cases import batch, model, theirs, tokens

WORLD = 2
GRADIENT_BARS = {"qwen3": 1e-9, "qwen3_5": DELTA_NET_GRADIENT_BAR}
CASES = [
    *itertools.product(GRADIENT_BARS, get_args(Gradient), [False]),
    *itertools.product(GRADIENT_BARS, ["exact"], [True]),
]
"""Family, gradient, and whether short responses share passes: other ones on each rank."""
ROWS = [(40, 6), (23, 1), (40, 1), (23, 5), (40, 0), (9, 3), (9, 2), (40, 4)]
SHARES = {"uneven": [[0], [1, 2]], "one has none": [[], [0, 1, 2]], "all on one": [[0, 1, 2], []]}
"""Groups of each rank, by their place in the batch: 40, 23 and 9 prompt tokens."""


def _sharded(stock: Any) -> nn.Module:
    for part in (*stock.model.layers, stock.model.embed_tokens, stock.lm_head):
        fully_shard(part)
    return fully_shard(stock)


def _walk(config: LongStrawConfig, family: str = "qwen3") -> GroupWalk:
    one = walk_of(driven(model(family)), config)
    _sharded(one.model.module)
    return one


def _run(one: GroupWalk, groups: list[Group], objective: Objective, grad: bool) -> dict[int, Any]:
    rows: dict[int, Any] = {}

    def on_row(row: Row, out: LogProbs) -> None:
        rows[row.index] = out.log_probs.detach()
        loss = objective.loss(row, out) * WORLD  # FSDP averages over ranks, the batch is a sum
        if loss.requires_grad:
            loss.backward()

    run = BatchRun(
        one,
        Meter(),
        Lockstep(dist.group.WORLD),
        key=lambda group: PromptKey(group.digest, 0),
        temperature=lambda row: objective.temperatures[row.index],
        on_row=on_row,
        entropy=True,
        grad=grad,
    )
    run.run(groups)
    return rows


def _whole(one: GroupWalk) -> dict[str, torch.Tensor]:
    return {n: g.full_tensor() for n, g in gradients_of(one.model.module).items()}  # type: ignore


def _uneven_work(rank: int, family: str, gradient: Gradient, waves: bool) -> dict[str, Any]:
    groups, objective = batch(ROWS)
    found = {}
    for name, shares in SHARES.items():
        config = LongStrawConfig(
            gradient=gradient,
            chunk_tokens=7 + 4 * rank,
            response_block=3 + 10 * rank,
            replay_tokens=6 + 12 * rank if waves else None,
            page_tokens=16,
            progress=False,
        )
        one = _walk(config, family)
        mine = [groups[i] for i in shares[rank]]
        scored = _run(one, mine, objective, grad=False)
        replayed = _run(one, mine, objective, grad=True)
        same = all(torch.equal(scored[i], replayed[i]) for i in replayed)
        found[name] = {"rows": replayed, "bitwise": same, "gradients": _whole(one)}
    return found


def _bad_input_on_one_rank(rank: int) -> str:
    lockstep = Lockstep(dist.group.WORLD)
    try:
        with lockstep.agree():
            if rank == 1:
                raise ValueError("prompts[3]: expected at least one token, got shape (0,)")
    except ValueError as error:
        return str(error)
    return ""


def _decoded(rank: int) -> list[list[int]]:
    one = _walk(LongStrawConfig(chunk_tokens=16, progress=False))
    samplings = [Sampling(max_new_tokens=6), Sampling(max_new_tokens=3, temperature=0.5)]
    lockstep, prompt = Lockstep(dist.group.WORLD), tokens(30, seed=2)
    samples = generate(one, prompt, lambda d: PromptKey(d, 0), samplings, rank, Meter(), lockstep)
    return [sample.token_ids for sample in samples]


def _everything(rank: int) -> dict[str, Any]:
    return {
        "bad": _bad_input_on_one_rank(rank),
        "work": {case: _uneven_work(rank, *case) for case in CASES},
        "decoded": _decoded(rank),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; starting processes takes far longer than what they do."""
    return run_ranks(_everything, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize(("family", "gradient", "waves"), CASES)
def test_ranks_with_different_work_give_the_gradients_of_one(
    results: list[dict[str, Any]], family: str, gradient: Gradient, waves: bool, name: str
) -> None:
    groups, objective = batch(ROWS)
    mode: Mode = "full" if gradient == "exact" else "detached"
    expected = theirs(model(family), groups, objective, mode)
    first, second = (result["work"][family, gradient, waves][name] for result in results)
    rows = first["rows"] | second["rows"]
    assert rows.keys() == expected.rows.keys()
    for index, row in expected.rows.items():
        assert torch.allclose(rows[index].to(row.log_probs), row.log_probs, rtol=0, atol=1e-9)
    for found in (first, second):
        assert found["bitwise"]
        apart = gradient_rel_l2(found["gradients"], expected.gradients)
        assert apart <= GRADIENT_BARS[family]


def test_bad_input_on_one_rank_raises_on_all(results: list[dict[str, Any]]) -> None:
    messages = [result["bad"] for result in results]
    assert all("prompts[3]" in m and "rank 1" in m for m in messages), messages


def test_ranks_decode_the_same_even_with_other_random_numbers(
    results: list[dict[str, Any]],
) -> None:
    first, second = (result["decoded"] for result in results)
    assert first == second
    assert [len(ids) for ids in first] == [6, 3]
