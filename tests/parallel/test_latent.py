"""Selection and sparse attention over owners of tokens, against one rank that holds them all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.kernels.index_topk import index_topk
from longstraw_backend.kernels.spans import Span
from longstraw_backend.kernels.sparse_mla import sparse_mla
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.parallel.latent import held_selection, merge_parts, owned_sparse_mla
from longstraw_backend.parallel.selection import owned_index_topk
from tests.ranks import run_ranks

HEADS, WIDTH, VALUE = 3, 24, 16
INDEX_HEADS, DIM = 64, 16
DTYPES = torch.float64, torch.float32
RUN = 6
"""Tokens of a rank in every block."""


class Case(NamedTuple):
    """A block over resident tokens.

    Attributes:
        blocks: resident ones, each dealt over the ranks as the new one.
        owner: that has all resident tokens instead.
        k: tokens to select.
        ties: index keys and queries of small integers: most scores have equals, exactly.
        only: all selected tokens are this rank's.
        blank: a token that selects nothing.
        pads: tokens at the end that are padding.
    """

    blocks: int = 3
    owner: int | None = None
    k: int = 8
    ties: bool = False
    only: int | None = None
    blank: int | None = None
    pads: int = 0

    def pages(self, world: int) -> list[tuple[int, int]]:
        """Start and owner of the runs of resident tokens, in order."""
        runs = range(self.blocks * world)
        return [(i * RUN, i % world if self.owner is None else self.owner) for i in runs]


CASES = {
    "dealt": Case(),
    "nothing resident": Case(blocks=0),
    "one rank has all that is resident": Case(owner=1),
    "more than a rank holds": Case(k=40),
    "more than there is": Case(k=200),
    "ties": Case(ties=True),
    "ties, one rank has all that is resident": Case(ties=True, owner=1),
    "ties, more than a rank holds": Case(ties=True, k=40),
    "all selected are of one rank": Case(only=1),
    "a query without tokens": Case(blank=7),
    "padding": Case(pads=2),
    "ranks with padding only": Case(pads=8),
}


class Inputs(NamedTuple):
    """Of all new tokens: index queries, weights, queries, cotangents; of all tokens: index keys
    and latents; and the selection that the attention is given instead of the indexer's."""

    index_q: Tensor
    weights: Tensor
    q: Tensor
    dout: Tensor
    dlse: Tensor
    keys: Tensor
    latents: Tensor
    selection: Tensor

    @property
    def start(self) -> int:
        return self.latents.shape[0] - self.q.shape[0]

    def without(self, pads: int) -> Inputs:
        """The last new tokens."""
        return Inputs(*(x[: x.shape[0] - pads] for x in self))


def make(case: Case, world: int, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(case.blocks + case.k)
    new, everything = RUN * world, RUN * world * (case.blocks + 1)
    index_shapes = (new, INDEX_HEADS, DIM), (new, INDEX_HEADS), (everything, DIM)
    shapes = (new, HEADS, WIDTH), (new, HEADS, VALUE), (new, HEADS), (everything, WIDTH)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    index_q, weights, keys = (
        torch.randint(-1, 2, s, generator=g).to(dtype) if case.ties else draw(s).to(dtype)
        for s in index_shapes
    )
    q, dout, dlse, latents = (draw(s).to(dtype) for s in shapes)
    selection = torch.full((new, case.k), -1, dtype=torch.int32)
    for s in range(new):
        seen = torch.arange(everything - new + s + 1)
        if case.only is not None:
            seen = seen[seen // RUN % world == case.only]
        picked = seen[torch.randperm(len(seen), generator=g)[: case.k]].sort().values
        selection[s, : len(picked)] = picked
    if case.blank is not None:
        selection[case.blank] = -1
    for cotangent in (dout, dlse):
        cotangent[new - case.pads :] = 0.0
    return Inputs(index_q, weights, q, dout, dlse, keys, latents, selection)


class Result(NamedTuple):
    """Of some new tokens: the indexer's selection, out, lse, dq and cotangents of their latents;
    and cotangents [T, WIDTH] of all resident tokens, zero where another rank owns them."""

    selection: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dlatents: Tensor
    dpages: Tensor


def on_one_rank(case: Case, world: int, dtype: torch.dtype) -> Result:
    x = make(case, world, dtype).without(case.pads)
    return run(x, slice(None), [(0, x.start)], index_topk, sparse_mla, case.k)


def on_this_rank(rank: int, name: str, dtype: torch.dtype) -> Result:
    ranks, case = Ranks.of(dist.group.WORLD), CASES[name]
    x = make(case, ranks.size, dtype)
    own = slice(rank * RUN, (rank + 1) * RUN)
    held = [(start, start + RUN) for start, owner in case.pages(ranks.size) if owner == rank]
    both = partial(owned_index_topk, ranks=ranks), partial(owned_sparse_mla, ranks=ranks)
    return run(x, own, held, *both, case.k)


def on_all_cases(rank: int) -> dict[tuple[str, torch.dtype], Result]:
    return {(name, dtype): on_this_rank(rank, name, dtype) for name in CASES for dtype in DTYPES}


def run(
    x: Inputs, own: slice, held: list[tuple[int, int]], select: Any, attend: Any, k: int
) -> Result:
    """Selection, attention and its backward of the tokens ``own`` over the resident ``held``."""

    def spans(rows: Tensor) -> list[Span]:
        return [Span(a, rows[a:b]) for a, b in held]

    selection = select(
        x.index_q[own],
        x.weights[own],
        x.keys[x.start :][own],
        spans(x.keys),
        start=x.start,
        k=k,
        scale=1.25 * DIM**-0.5,
    )
    q = x.q[own].clone().requires_grad_()
    latents = x.latents[x.start :][own].clone().requires_grad_()
    dpages = torch.zeros_like(x.latents[: x.start])
    out = attend(
        q,
        latents,
        x.selection[own],
        spans(x.latents),
        start=x.start,
        scale=WIDTH**-0.5,
        value_dim=VALUE,
        page_grads=[rows for _, rows in spans(dpages)],
    )
    grads = torch.autograd.grad(out, (q, latents), (x.dout[own], x.dlse[own]))
    return Result(selection, *(t.detach() for t in out), *grads, dpages)


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def results(
    world: int, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, torch.dtype], Result]]:
    """Rank by rank, of each case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(on_all_cases, world, folder)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
def test_ranks_select_and_attend_as_one(
    name: str, world: int, dtype: torch.dtype, results: list[Any]
) -> None:
    one, parts = on_one_rank(CASES[name], world, dtype), [r[name, dtype] for r in results]
    together = [torch.cat(x) for x in zip(*(p[:-1] for p in parts), strict=True)]
    dpages = torch.stack([p.dpages for p in parts]).sum(0)
    real = one.out.shape[0]
    assert not any(gradient[real:].any() for gradient in together[3:])
    together = [x[:real] for x in together]
    assert torch.equal(together[0], one.selection)
    bar = 1e-10 if dtype == torch.float64 else 1e-5
    for a, b in zip([*together[1:], dpages], one[1:], strict=True):
        assert not a.isnan().any()
        torch.testing.assert_close(a, b, rtol=bar, atol=bar)


def test_cotangents_stay_with_their_owner(world: int, results: list[Any]) -> None:
    for rank, result in enumerate(results):
        part = result["dealt", torch.float64]
        for start, owner in CASES["dealt"].pages(world):
            assert part.dpages[start : start + RUN].any() == (owner == rank)


def test_planted_ties_are_ties_of_different_owners(world: int) -> None:
    x = make(CASES["ties"], world, torch.float64)
    products = (torch.einsum("shd,td->sht", x.index_q, x.keys[: x.start])).relu()
    scores = torch.einsum("sh,sht->st", x.weights, products)
    level = scores.topk(8).values[:, -1:] == scores
    owners = torch.arange(x.start) // RUN % world
    spread = [owners[row].unique().numel() for row in level]
    assert max(spread) > 1


def test_a_single_rank_gets_what_it_gets_without_ranks() -> None:
    x, alone = make(CASES["dealt"], 2, torch.float32), Ranks()
    both = partial(owned_index_topk, ranks=alone), partial(owned_sparse_mla, ranks=alone)
    actual = run(x, slice(None), [(0, x.start)], *both, 8)
    for a, b in zip(actual, on_one_rank(CASES["dealt"], 2, torch.float32), strict=True):
        assert torch.equal(a, b)


def test_held_selection_moves_what_is_held_to_the_left() -> None:
    spans = [Span(a, torch.zeros(3, 1)) for a in (2, 5, 20)]
    selection = torch.tensor([[0, 2, 7, 8, 22], [1, 9, -1, -1, -1], [4, 5, 20, -1, -1]])
    expected = [[2, 7, 22], [-1, -1, -1], [4, 5, 20]]
    assert held_selection(selection.int(), spans).tolist() == expected
    assert held_selection(selection[1:2].int(), spans).tolist() == [[-1]]


def test_merged_parts_pass_gradcheck_and_skip_empty_ones() -> None:
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 4, 2, 5, generator=g, dtype=torch.float64).requires_grad_()
    lses = torch.randn(3, 4, 2, generator=g, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(merge_parts, (outs, lses))
    empty = lses.detach().clone()
    empty[1], empty[:, 3] = float("-inf"), float("-inf")
    empty.requires_grad_()
    merged = merge_parts(outs, empty)
    without = merge_parts(outs[::2], empty[::2])
    assert all(torch.equal(a, b) for a, b in zip(merged, without, strict=True))
    assert (merged.out[3] == 0).all() and (merged.lse[3] == float("-inf")).all()
    douts, dlses = torch.autograd.grad(merged, (outs, empty), [torch.ones_like(x) for x in merged])
    assert not douts[1].any() and not dlses[1].any() and not dlses[:, 3].any()


def test_rejects_pages_that_reach_into_the_block() -> None:
    x = make(CASES["dealt"], 2, torch.float64)
    two = Ranks(rank=1, size=2)
    pages = [Span(x.start, x.latents[x.start :])]
    where: dict[str, Any] = dict(ranks=two, start=x.start, scale=1.0)
    with pytest.raises(ValueError, match=r"pages\[0\]: expected positions in order"):
        owned_sparse_mla(x.q, x.latents[x.start :], x.selection, pages, value_dim=VALUE, **where)
    pages = [Span(x.start, x.keys[x.start :])]
    with pytest.raises(ValueError, match=r"pages\[0\]: expected positions in order"):
        owned_index_topk(x.index_q, x.weights, x.keys[x.start :], pages, k=8, **where)
