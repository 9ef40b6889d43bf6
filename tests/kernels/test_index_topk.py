"""The indexer's selection against all scores at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.kernels.index_topk import index_candidates, index_topk, merge_candidates
from longstraw_backend.kernels.index_topk import scores as blocking
from longstraw_backend.kernels.spans import Span, consecutive

HEADS, DIM = 8, 16
SCALE = 1.25 * DIM**-0.5
WHERE: dict[str, Any] = dict(start=200, k=16, scale=SCALE)
Maker = Callable[[int, int, torch.dtype], tuple[Tensor, Tensor, Tensor]]


def make(
    tokens: int,
    resident: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    heads: int = HEADS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and weights of the new tokens, and keys of all tokens."""
    g = torch.Generator().manual_seed(seed)
    shapes = (tokens, heads, DIM), (tokens, heads), (resident + tokens, DIM)
    q, w, keys = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    return q, w, keys


def ties(tokens: int, resident: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers: sums are exact in any order, and most scores have equals."""
    g = torch.Generator().manual_seed(3)
    shapes = (tokens, HEADS, DIM), (tokens, HEADS), (resident + tokens, DIM)
    q, w, keys = (torch.randint(-1, 2, s, generator=g).to(dtype) for s in shapes)
    return q, w, keys


def pages_of(keys: Tensor, cuts: tuple[int, ...]) -> list[Span]:
    return consecutive([keys[a:b] for a, b in pairwise(cuts)])


def select(
    q: Tensor, w: Tensor, keys: Tensor, k: int, cuts: tuple[int, ...] | None = None
) -> Tensor:
    start = keys.shape[0] - q.shape[0]
    cuts = ((0, start) if start else (0,)) if cuts is None else cuts
    pages = pages_of(keys, cuts)
    return index_topk(q, w, keys[start:], pages, start=start, k=k, scale=SCALE)


def brute_force(q: Tensor, w: Tensor, keys: Tensor, k: int) -> Tensor:
    """All scores at once; one stable sort puts higher scores first and lower positions before."""
    start = keys.shape[0] - q.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    products = (torch.einsum("shd,td->sht", q.to(wide), keys.to(wide)) * SCALE).relu()
    scores = torch.einsum("sh,sht->st", w.to(wide), products)
    picked = torch.full((q.shape[0], k), -1, dtype=torch.int32)
    for s, row in enumerate(scores):
        valid = row[: start + s + 1]
        best = valid.sort(descending=True, stable=True).indices[:k].sort().values
        picked[s, : len(best)] = best
    return picked


@pytest.mark.parametrize(
    ("tokens", "resident", "k"),
    [(1, 0, 4), (1, 1, 1), (1, 300, 7), (63, 0, 8), (40, 200, 16), (40, 5, 64), (17, 900, 2048)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matches_brute_force(tokens: int, resident: int, k: int, dtype: torch.dtype) -> None:
    q, w, keys = make(tokens, resident, dtype)
    assert torch.equal(select(q, w, keys, k), brute_force(q, w, keys, k))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 5, 64, 150])
def test_ties_go_to_the_lower_position(dtype: torch.dtype, k: int) -> None:
    q, w, keys = ties(40, 200, dtype)
    assert torch.equal(select(q, w, keys, k), brute_force(q, w, keys, k))


def test_equal_keys_select_the_first_ones() -> None:
    q, w, keys = make(5, 95)
    keys = keys[:1].expand(100, DIM).contiguous()
    expected = torch.arange(6, dtype=torch.int32).expand(5, 6)
    assert torch.equal(select(q, w, keys, 6), expected)


@pytest.mark.parametrize("maker", [make, ties])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cuts", [(0, 1, 200), (0, 63, 64, 65, 200), (0, 128, 200), tuple(range(201))]
)
def test_cuts_into_pages_change_nothing(
    maker: Maker, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    q, w, keys = maker(40, 200, dtype)
    assert torch.equal(select(q, w, keys, 16, cuts), select(q, w, keys, 16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cuts", [(0, 7, 64, 200), (0, 100, 200), tuple(range(0, 201, 8))])
def test_scores_have_the_same_bits_for_any_pages(
    dtype: torch.dtype, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "KEY_BLOCK", 64)
    q, w, keys = make(40, 200, dtype)
    whole, cut = (
        index_candidates(q, w, [*pages_of(keys, c), Span(200, keys[200:])], **WHERE)
        for c in ((0, 200), cuts)
    )
    assert torch.equal(whole.scores, cut.scores)
    assert torch.equal(whole.positions, cut.positions)


@pytest.mark.parametrize("maker", [make, ties])
@pytest.mark.parametrize(("key_block", "rows"), [(16, 1), (64, 24), (64, 80), (512, 160)])
def test_block_sizes_change_nothing(
    maker: Maker, key_block: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, w, keys = maker(40, 300, torch.float64)
    whole = select(q, w, keys, 16)
    monkeypatch.setattr(blocking, "KEY_BLOCK", key_block)
    monkeypatch.setattr(blocking, "QUERY_ROWS", rows)
    assert torch.equal(select(q, w, keys, 16), whole)


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (7, 3, 30), (39, 1)])
def test_tokens_in_chunks_select_as_in_one_call(chunks: tuple[int, ...]) -> None:
    q, w, keys = make(40, 200)
    whole, start, parts = select(q, w, keys, 16), 0, []
    for size in chunks:
        stop = start + size
        parts.append(select(q[start:stop], w[start:stop], keys[: 200 + stop], 16))
        start = stop
    assert torch.equal(torch.cat(parts), whole)


def test_selects_no_later_token_and_ignores_its_key() -> None:
    q, w, keys = make(40, 60)
    before = select(q, w, keys, 16)
    assert (before <= torch.arange(60, 100)[:, None]).all()
    keys[-1] = 100.0
    assert torch.equal(select(q, w, keys, 16)[:-1], before[:-1])


def test_finds_planted_keys_far_back() -> None:
    q, w, keys = make(3, 5000, torch.float32)
    w = w.abs()
    planted = [0, 17, 1234, 4095, 4096]
    keys[planted] = 5 * q[2].mean(0) / q[2].mean(0).norm() * DIM**0.5
    assert set(planted) <= set(select(q, w, keys, 32)[2].tolist())


@pytest.mark.parametrize("maker", [make, ties])
@pytest.mark.parametrize("owners", [1, 2, 3, 7])
def test_owners_of_dealt_blocks_select_as_one(maker: Maker, owners: int) -> None:
    q, w, keys = maker(40, 200, torch.float64)
    dealt = pages_of(keys, (*range(0, 240, 13), 240))
    parts = [index_candidates(q, w, dealt[r::owners], **WHERE) for r in range(owners)]
    parts.append(index_candidates(q, w, [], **WHERE))  # owns nothing
    for order in itertools.islice(itertools.permutations(parts), 4):
        assert torch.equal(merge_candidates(order, 16), select(q, w, keys, 16))


@pytest.mark.parametrize("maker", [make, ties])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [1, 13, 64])
def test_scores_have_the_same_bits_on_any_owner(
    maker: Maker, dtype: torch.dtype, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "KEY_BLOCK", 64)
    q, w, keys = maker(40, 200, dtype)
    where = dict(WHERE, k=240)
    whole = index_candidates(q, w, [Span(0, keys)], **where)
    dealt = pages_of(keys, (*range(0, 240, run), 240))
    for owner in range(3):
        part = index_candidates(q, w, dealt[owner::3], **where)
        for scores, positions, expected in zip(*part, whole.scores, strict=True):
            there = scores > float("-inf")
            assert torch.equal(scores[there], expected[positions[there].long()])


def test_an_owner_scores_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the gaps between its keys."""
    monkeypatch.setattr(blocking, "KEY_BLOCK", 64)
    _, _, keys = make(40, 600)
    held = pages_of(keys, tuple(range(0, 641, 8)))[::4]
    blocks = list(blocking.key_blocks(held, blocking.key_block_size(640), keys.device))
    assert [sum(map(len, b.runs)) for b in blocks] == [64, 64, 32]
    assert [b.keys.shape[0] for b in blocks] == [64, 64, 64]


def test_nan_is_selected() -> None:
    q, w, keys = make(4, 100)
    keys[50] = float("nan")
    assert (select(q, w, keys, 3) == 50).any(dim=1).all()


def test_memory_is_bounded_by_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the walk has more entries than a block of products, however many the keys."""
    monkeypatch.setattr(blocking, "KEY_BLOCK", 64)
    monkeypatch.setattr(blocking, "QUERY_ROWS", 2 * HEADS)
    largest = Largest()
    for resident in (500, 4000):
        q, w, keys = make(64, resident, torch.float32)
        with largest:
            select(q, w, keys, 16)
    assert largest.entries <= max(2 * HEADS * 64, keys.numel(), q.numel())


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Entries of the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.entries = max(self.entries, t.numel())
        return out


def test_result_has_no_gradient() -> None:
    q, w, keys = make(4, 20)
    out = index_candidates(
        q.requires_grad_(), w.requires_grad_(), [Span(0, keys)], start=20, k=4, scale=1.0
    )
    assert not out.scores.requires_grad and out.positions.dtype == torch.int32


def test_rejects_what_does_not_fit() -> None:
    q, w, keys = make(4, 20)
    own, page = keys[20:], Span(0, keys[:20])
    where: dict[str, Any] = dict(start=20, k=4, scale=1.0)
    with pytest.raises(ValueError, match=r"q: expected \[S, H, D\]"):
        index_topk(q[0], w, own, [page], **where)
    with pytest.raises(ValueError, match=r"weights: expected \[4, 8\]"):
        index_topk(q, w[:, :7], own, [page], **where)
    with pytest.raises(ValueError, match=r"keys: expected \[4, 16\]"):
        index_topk(q, w, own[:3], [page], **where)
    with pytest.raises(ValueError, match=r"pages\[0\]: captured as torch.float32"):
        index_topk(q, w, own, [Span(0, page.rows.float())], **where)
    with pytest.raises(ValueError, match=r"pages\[1\]: expected positions in order"):
        index_topk(q, w, own, [page, page], **where)
    with pytest.raises(ValueError, match=r"pages\[0\]: expected positions in order within \[0, 19"):
        index_topk(q, w, own, [page], start=19, k=4, scale=1.0)
    with pytest.raises(ValueError, match="k: expected at least 1"):
        index_topk(q, w, own, [page], start=20, k=0, scale=1.0)
