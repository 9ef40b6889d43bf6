"""Selection and sparse attention over owners of tokens, against one rank that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.kernels.index_topk import index_topk
from longstraw_backend.kernels.spans import Span
from longstraw_backend.kernels.sparse_mla import LatentAttention, dense_mla, sparse_mla
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.parallel.latent import (
    merge_parts,
    owners_dense_mla,
    owners_sparse_mla,
    rows_selected,
)
from longstraw_backend.parallel.selection import owners_topk
from tests.ranks import run_ranks

HEADS, WIDTH, VALUE = 3, 24, 16
INDEX_HEADS, DIM = 64, 16
INDEX_SCALE = 1.25 * DIM**-0.5
HOW: dict[str, Any] = dict(scale=WIDTH**-0.5, value_dim=VALUE)
DTYPES = torch.float64, torch.float32
RUN = 6
"""Tokens of a rank in every block."""
PAGE = 7
"""Tokens of a page; not in step with the runs."""


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
DENSE = ["dealt", "nothing resident", "one rank has all that is resident", "padding"]


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
    where = dict(start=x.start, k=case.k, scale=INDEX_SCALE)
    own, pages = x.keys[x.start :], [Span(0, x.keys[: x.start])]
    selection = index_topk(x.index_q, x.weights, own, pages, **where)

    def attend(q: Tensor, latents: Tensor, page: Tensor, dpage: Tensor) -> LatentAttention:
        args = q, latents, x.selection, [Span(0, page)]
        return sparse_mla(*args, start=x.start, page_grads=[dpage], **HOW)

    return Result(selection, *value_and_grads(x, attend, slice(None), torch.arange(x.start)))


def on_this_rank(case: Case, ranks: Ranks, dtype: torch.dtype) -> Result:
    x, own = make(case, ranks.size, dtype), slice(ranks.rank * RUN, (ranks.rank + 1) * RUN)
    runs = [range(a, a + RUN) for a, owner in case.pages(ranks.size) if owner == ranks.rank]
    held = torch.tensor([t for run in runs for t in run], dtype=torch.int64)
    where = dict(runs=runs, start=x.start, k=case.k, scale=INDEX_SCALE)
    args = x.index_q[own], x.weights[own], x.keys[x.start :][own], x.keys[held].split(PAGE)
    selection = owners_topk(*args, ranks, **where)

    def attend(q: Tensor, latents: Tensor, page: Tensor, dpage: Tensor) -> LatentAttention:
        pages, grads = page.split(PAGE), dpage.split(PAGE)
        args = q, latents, x.selection[own], pages, ranks
        return owners_sparse_mla(*args, runs=runs, start=x.start, page_grads=grads, **HOW)

    return Result(selection, *value_and_grads(x, attend, own, held))


def dense_on_this_rank(case: Case, ranks: Ranks, dtype: torch.dtype) -> list[Tensor]:
    x, own = make(case, ranks.size, dtype), slice(ranks.rank * RUN, (ranks.rank + 1) * RUN)
    owners = torch.tensor([owner for _, owner in case.pages(ranks.size)]).repeat_interleave(RUN)
    held = (owners == ranks.rank).nonzero()[:, 0]

    def attend(q: Tensor, latents: Tensor, page: Tensor, dpage: Tensor) -> LatentAttention:
        pages, grads = ([p[None] for p in t.split(PAGE) if len(p)] for t in (page, dpage))
        how: Any = dict(resident=x.start > 0, page_grads=grads, **HOW)
        out = owners_dense_mla(q[None], latents[None], pages, ranks, **how)
        return LatentAttention(out[0], q.sum(-1) * 0)

    return value_and_grads(x, attend, own, held)


def value_and_grads(
    x: Inputs, attend: Callable[..., LatentAttention], own: slice, held: Tensor
) -> list[Tensor]:
    """Out, lse and gradients of the tokens ``own`` over resident ones at positions ``held``."""
    q = x.q[own].clone().requires_grad_()
    latents = x.latents[x.start :][own].clone().requires_grad_()
    page = x.latents[held]
    dpage = torch.zeros_like(page)
    out = attend(q, latents, page, dpage)
    grads = torch.autograd.grad(out, (q, latents), (x.dout[own], x.dlse[own]))
    dpages = torch.zeros_like(x.latents[: x.start])
    dpages[held] = dpage
    return [*(t.detach() for t in out), *grads, dpages]


class Results(NamedTuple):
    """Of one rank, by case and dtype."""

    sparse: dict[tuple[str, torch.dtype], Result]
    dense: dict[tuple[str, torch.dtype], list[Tensor]]


def on_all_cases(rank: int) -> Results:
    ranks = Ranks.of(dist.group.WORLD)
    cases = [(name, dtype) for name in CASES for dtype in DTYPES]
    dense = [key for key in cases if key[0] in DENSE]
    return Results(
        {(name, dtype): on_this_rank(CASES[name], ranks, dtype) for name, dtype in cases},
        {(name, dtype): dense_on_this_rank(CASES[name], ranks, dtype) for name, dtype in dense},
    )


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def results(world: int, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Rank by rank."""
    return run_ranks(on_all_cases, world, tmp_path_factory.mktemp("ranks"))


def assert_as_one(parts: Sequence[Sequence[Tensor]], one: Sequence[Tensor], bar: float) -> None:
    """Out, lse, dq, dlatents, dpages of ranks against one rank, which has no padding."""
    *together, dpages = (list(x) for x in zip(*parts, strict=True))
    real = one[0].shape[0]
    for i, (tokens, b) in enumerate(zip(together, one[:-1], strict=True)):
        a = torch.cat(tokens)
        assert not a.isnan().any()
        assert i < 2 or not a[real:].any(), "padding has a gradient"
        torch.testing.assert_close(a[:real], b, rtol=bar, atol=bar)
    torch.testing.assert_close(torch.stack(dpages).sum(0), one[-1], rtol=bar, atol=bar)


BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])


@pytest.mark.parametrize("name", CASES)
@each_dtype
def test_ranks_select_and_attend_as_one(
    name: str, world: int, dtype: torch.dtype, results: list[Results]
) -> None:
    one, parts = on_one_rank(CASES[name], world, dtype), [r.sparse[name, dtype] for r in results]
    selection = torch.cat([p.selection for p in parts])
    assert torch.equal(selection[: one.out.shape[0]], one.selection)
    assert_as_one([p[1:] for p in parts], one[1:], BARS[dtype])


@pytest.mark.parametrize("name", DENSE)
@each_dtype
def test_ranks_attend_to_all_tokens_as_one(
    name: str, world: int, dtype: torch.dtype, results: list[Results]
) -> None:
    x = make(CASES[name], world, dtype).without(CASES[name].pads)

    def attend(q: Tensor, latents: Tensor, page: Tensor, dpage: Tensor) -> LatentAttention:
        pages, grads = ([t[None]] if len(t) else [] for t in (page, dpage))
        out = dense_mla(q[None], latents[None], pages, page_grads=grads, **HOW)
        return LatentAttention(out[0], q.sum(-1) * 0)

    one = value_and_grads(x, attend, slice(None), torch.arange(x.start))
    assert_as_one([r.dense[name, dtype] for r in results], one, BARS[dtype])


def test_cotangents_stay_with_their_owner(world: int, results: list[Results]) -> None:
    for start, owner in CASES["dealt"].pages(world):
        dpages = [r.sparse["dealt", torch.float64].dpages[start : start + RUN] for r in results]
        assert [rank for rank, x in enumerate(dpages) if x.any()] == [owner]


def test_planted_ties_are_ties_of_different_owners(world: int) -> None:
    x = make(CASES["ties"], world, torch.float64)
    products = (torch.einsum("shd,td->sht", x.index_q, x.keys[: x.start])).relu()
    scores = torch.einsum("sh,sht->st", x.weights, products)
    level = scores.topk(8).values[:, -1:] == scores
    owners = torch.arange(x.start) // RUN % world
    spread = [owners[row].unique().numel() for row in level]
    assert max(spread) > 1


def test_a_single_rank_gets_what_it_gets_without_ranks() -> None:
    actual = on_this_rank(Case(), Ranks(), torch.float32)
    for a, b in zip(actual, on_one_rank(Case(), 1, torch.float32), strict=True):
        assert torch.equal(a, b)


def test_selected_rows_are_those_held_in_order_at_the_left() -> None:
    runs = [range(a, a + 3) for a in (2, 5, 20)]
    selection = torch.tensor([[0, 2, 7, 8, 22], [1, 9, -1, -1, -1], [4, 5, 20, -1, -1]])
    expected = [[0, 5, 8], [-1, -1, -1], [2, 3, 6]]
    assert rows_selected(selection.int(), runs).tolist() == expected
    assert rows_selected(selection[1:2].int(), runs).tolist() == [[-1]]


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


def test_rejects_positions_that_do_not_fit() -> None:
    x, second = make(Case(), 2, torch.float64), Ranks(rank=1, size=2)
    pages, runs = [x.latents[:RUN]], [range(x.start, x.start + RUN)]
    args = x.q, x.latents[x.start :], x.selection, pages, second
    with pytest.raises(ValueError, match=r"pages\[0\]: expected positions in order"):
        owners_sparse_mla(*args, runs=runs, start=x.start, **HOW)
    with pytest.raises(ValueError, match="runs: expected the positions of all 6 rows"):
        owners_sparse_mla(*args, runs=[range(5)], start=x.start, **HOW)
    args = x.index_q, x.weights, x.keys[x.start :], [x.keys[:RUN]], second
    with pytest.raises(ValueError, match=r"pages\[0\]: expected positions in order"):
        owners_topk(*args, runs=runs, start=x.start, k=8, scale=1.0)
