"""Staging of pages, on a CPU that copies as if they rested elsewhere; see also the GPU's tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.kernels import staging
from longstraw_backend.kernels.index_topk import index_topk
from longstraw_backend.kernels.segment_attention import segment_attention
from longstraw_backend.kernels.spans import consecutive
from longstraw_backend.kernels.sparse_mla import dense_mla, sparse_mla
from longstraw_backend.kernels.staging import (
    STAGINGS,
    contiguous_parts,
    here,
    reachable,
    staged,
)
from tests.kernels.attention_inputs import OWN, SHARED, Case, make_inputs, value_and_grads

CPU = torch.device("cpu")
CASE = Case(2, 6, 2, 17, ((33, SHARED), (1, OWN), (1, SHARED), (7, OWN)))
each_staging = pytest.mark.parametrize("mode", STAGINGS)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as being on the device."""
    monkeypatch.setattr(staging, "away", lambda x, device: True)


def pages(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Pages of two tensors cut out of longer buffers, so strided, with different numbers."""
    made = []
    for i, size in enumerate(sizes):
        k = torch.arange(2 * 3 * (size + 2) * 4, dtype=torch.float32).reshape(2, 3, size + 2, 4)
        made.append(((k + 1000 * i)[:, :, :size], torch.full((1, size), i, dtype=torch.int64)))
    return made


@each_staging
def test_what_is_on_the_device_passes_as_it_is(mode: Any) -> None:
    held = pages((3, 5, 1))
    for found, page in zip(staged(held, CPU, mode), held, strict=True):
        assert all(a is b for a, b in zip(found, page, strict=True))
    assert here(held[0][0], CPU) is held[0][0]


@each_staging
@pytest.mark.parametrize("sizes", [(), (4,), (3, 3), (5, 5, 5, 2), (1, 9, 2, 9, 30)])
@pytest.mark.usefixtures("copying")
def test_copies_are_equal_in_order_and_laid_out_alike(mode: Any, sizes: tuple[int, ...]) -> None:
    held, seen = pages(sizes), 0
    for found, page in zip(staged(held, CPU, mode), held, strict=True):
        for a, b in zip(found, page, strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
            assert (a.stride(), a.dtype) == (b.stride(), b.dtype)
        seen += 1
    assert seen == len(sizes)


@pytest.mark.usefixtures("copying")
def test_segments_take_turns_in_two_rooms() -> None:
    places = [page[0].data_ptr() for page in staged(pages((5,) * 7), CPU)]
    assert len(set(places)) == 2 and all(a != b for a, b in pairwise(places))


@pytest.mark.usefixtures("copying")
def test_segments_are_fetched_one_ahead() -> None:
    asked: list[int] = []

    def one_by_one() -> Iterator[tuple[Tensor, Tensor]]:
        for i, page in enumerate(pages((5,) * 4)):
            asked.append(i)
            yield page

    counts = [len(asked) for _ in staged(one_by_one(), CPU)]
    assert counts == [2, 3, 4, 4]


@pytest.mark.usefixtures("copying")
def test_a_layer_is_there_as_a_whole() -> None:
    held = pages((5, 5, 5))
    found = list(staged(held, CPU, "layer"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, held, strict=True))


def test_rejects_an_unknown_way() -> None:
    with pytest.raises(ValueError, match="staging: expected one of segments, layer, got 'pages'"):
        staged([], CPU, "pages")  # type: ignore[arg-type]


def test_parts_are_as_large_as_can_be_moved_at_once() -> None:
    whole = torch.arange(2 * 3 * 8 * 4.0).reshape(2, 3, 8, 4)
    assert len(list(contiguous_parts(torch.empty_like(whole), whole))) == 1
    cut, into = whole[:, :, 2:7], torch.zeros(2, 3, 8, 4)
    parts = list(contiguous_parts(into[:, :, :5], cut))
    assert len(parts) == 6 and all(a.is_contiguous() and b.is_contiguous() for a, b in parts)
    for a, b in parts:
        a.copy_(b)
    assert torch.equal(into[:, :, :5], cut) and not into[:, :, 5:].any()


def test_only_memory_beside_a_gpu_is_reachable_from_elsewhere() -> None:
    cuda, other = torch.device("cuda", 0), torch.device("cuda", 1)
    on_cpu, on_meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert reachable(on_cpu, CPU) and reachable(on_cpu, cuda) and reachable(on_cpu, other)
    assert not reachable(on_meta, CPU) and not reachable(on_meta, cuda)
    assert not reachable(on_cpu, torch.device("meta"))


@each_staging
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_attention_over_staged_pages_is_bitwise_the_same(
    mode: Any, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(CASE, torch.float32)
    attention = partial(segment_attention, scale=CASE.scale, impl=impl, staging=mode)
    expected = value_and_grads(attention, inputs)
    monkeypatch.setattr(staging, "away", lambda x, device: True)
    for a, b in zip(value_and_grads(attention, inputs), expected, strict=True):
        assert torch.equal(a, b)


@each_staging
@pytest.mark.usefixtures("copying")
def test_the_graph_keeps_pages_where_they_rest(mode: Any) -> None:
    inputs = make_inputs(CASE, torch.float32)
    saved: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        saved.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q = inputs.q.detach().requires_grad_()
        out = segment_attention(q, inputs.k, inputs.v, inputs.pages, scale=1.0, staging=mode)
    known = [inputs.q, inputs.k, inputs.v, out, *(t for page in inputs.pages for t in page)]
    others = saved - {t.untyped_storage().data_ptr() for t in known}
    assert len(others) == 1  # the log-sum-exp


@pytest.mark.parametrize("page", [7, 64, 1000])
def test_selection_over_staged_keys_is_the_same(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    q, w, keys = (torch.randn(*s, generator=g) for s in ((40, 8, 16), (40, 8), (340, 16)))
    held = consecutive(keys[:300].split(page))
    select = partial(index_topk, q, w, keys[300:], held, start=300, k=16, scale=0.25)
    monkeypatch.setattr("longstraw_backend.kernels.index_topk.scores.KEY_BLOCK", 64)
    monkeypatch.setattr("longstraw_backend.kernels.index_topk.scores.QUERY_ROWS", 24)
    expected = select()
    monkeypatch.setattr(staging, "away", lambda x, device: True)
    assert torch.equal(select(), expected)


def test_latents_that_are_staged_give_the_same_bits_and_get_their_cotangents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = (17, 3, 24), (17, 24), (60, 24)
    q, own, old = (torch.randn(*s, generator=g) for s in shapes)
    leaves = q.requires_grad_(), own.requires_grad_()
    selection = torch.stack([torch.randperm(61, generator=g)[:8] for _ in range(17)]).int()

    def run() -> list[Tensor]:
        sums = torch.zeros_like(old)
        where: Any = dict(start=60, scale=0.25, value_dim=16, page_grads=sums.split(25))
        out = sparse_mla(q, own, selection, consecutive(old.split(25)), **where).out
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves), sums]

    expected = run()
    monkeypatch.setattr(staging, "away", lambda x, device: True)
    for a, b in zip(run(), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("copying")
def test_dense_latents_are_staged() -> None:
    g = torch.Generator().manual_seed(0)
    q, own, old = (torch.randn(*s, generator=g) for s in ((1, 9, 3, 24), (1, 9, 24), (1, 60, 24)))
    run = partial(dense_mla, q, own, scale=0.25, value_dim=16)
    torch.testing.assert_close(run(old.split(25, dim=1)), run([old]))
