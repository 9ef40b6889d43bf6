"""The indexer's scores on a CUDA device at the models' sizes: same bits on any owner of keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from longstraw_backend.kernels.index_topk import index_candidates, merge_candidates
from longstraw_backend.kernels.spans import Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
HEADS, DIM, OWNERS = 32, 128, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [64, 250, 1024])
def test_owners_score_and_select_as_one(dtype: torch.dtype, run: int) -> None:
    new, total, k = 300, 20_000, 2048
    g = torch.Generator(DEVICE).manual_seed(run)
    shapes = (new, HEADS, DIM), (new, HEADS), (total, DIM)
    q, w, keys = (torch.randn(*s, generator=g, device=DEVICE).to(dtype) for s in shapes)
    dealt = [Span(a, keys[a:b]) for a, b in pairwise((*range(0, total, run), total))]
    where: dict[str, Any] = dict(start=total - new, scale=DIM**-0.5)
    whole = index_candidates(q, w, [Span(0, keys)], k=total, **where).scores
    parts = [index_candidates(q, w, dealt[r::OWNERS], k=k, **where) for r in range(OWNERS)]
    for part in parts:
        there = part.scores > float("-inf")
        expected = whole.gather(1, part.positions.long().clamp_min(0))
        assert torch.equal(part.scores[there], expected[there])
    one = index_candidates(q, w, [Span(0, keys)], k=k, **where).selection(k)
    assert torch.equal(merge_candidates(parts, k), one)
