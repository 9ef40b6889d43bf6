"""Attention over owners against one rank that holds everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page, segment_attention
from longstraw_backend.parallel.attention import owners_attention
from longstraw_backend.parallel.exchange import Ranks
from tests.ranks import run_ranks

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
OWNED = {2: [[7, 4], []], 4: [[5], [], [1, 6], [3]]}
"""Tokens of each page, rank by rank; some ranks own nothing."""


def _tensors(world: int, run: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(run)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, DIM, generator=draw, dtype=torch.float64).to(dtype)

    block = world * run
    pages = [[Page(normal(KV_HEADS, n), normal(KV_HEADS, n)) for n in own] for own in OWNED[world]]
    q, dout = normal(HEADS, block), normal(HEADS, block)
    return dict(q=q, k=normal(KV_HEADS, block), v=normal(KV_HEADS, block), dout=dout, pages=pages)


def _run(attention: Any, pages: list[Page], *inputs: Tensor) -> dict[str, Any]:
    *leaves, dout = inputs
    leaves = [x.clone().requires_grad_() for x in leaves]
    sums = [Page(torch.zeros_like(p.k), torch.zeros_like(p.v)) for p in pages]
    out = attention(*leaves, pages, scale=SCALE, page_grads=sums)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "grads": grads, "pages": [tuple(s) for s in sums]}


def _rank(rank: int, world: int, cases: list[Any]) -> list[Any]:
    ranks, found = Ranks.of(dist.group.WORLD), []
    for run, dtype, resident in cases:
        t = _tensors(world, run, dtype)
        part = slice(rank * run, (rank + 1) * run)
        attention = partial(owners_attention, ranks=ranks, resident=resident)
        pages = t["pages"][rank] if resident else []
        mine = [t[name][:, :, part] for name in ("q", "k", "v", "dout")]
        found.append(_run(attention, pages, *mine))
    return found


CASES = [(5, torch.float64, True), (1, torch.float64, True), (6, torch.float32, True)]
CASES += [(5, torch.float64, False), (1, torch.float32, False)]


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_rank(world: int, tmp_path: Path) -> None:
    results = run_ranks(partial(_rank, world=world, cases=CASES), world, tmp_path)
    for i, (run, dtype, resident) in enumerate(CASES):
        t = _tensors(world, run, dtype)
        pages = [p for own in t["pages"] for p in own] if resident else []
        one = _run(segment_attention, pages, *(t[n] for n in ("q", "k", "v", "dout")))
        close = partial(
            torch.testing.assert_close, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
        )
        close(torch.cat([r[i]["out"] for r in results], 2), one["out"])
        for whole, *parts in zip(one["grads"], *(r[i]["grads"] for r in results), strict=True):
            close(torch.cat(parts, 2), whole)
        found = [page for r in results for page in r[i]["pages"]]
        for ours, theirs in zip(found, one["pages"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                close(a, b)


def test_alone_it_is_segment_attention() -> None:
    t = _tensors(2, 9, torch.float64)
    pages = t["pages"][0]
    inputs = [t[name] for name in ("q", "k", "v", "dout")]
    one = _run(segment_attention, pages, *inputs)
    alone = _run(partial(owners_attention, ranks=Ranks(), resident=True), pages, *inputs)
    torch.testing.assert_close(alone, one, rtol=0, atol=1e-12)
