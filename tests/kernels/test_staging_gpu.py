"""Pages in pinned CPU memory against the same pages on a CUDA device: bits, order, memory.

Some backward kernels add with atomics, so two runs over the same pages may differ in the last bit.
Where two runs on the device agree bitwise, staging must; elsewhere it must be as close as they are
to the eye of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.kernels.index_topk import index_topk
from longstraw_backend.kernels.segment_attention import Page, choose_impl, segment_attention
from longstraw_backend.kernels.spans import consecutive
from longstraw_backend.kernels.sparse_mla import dense_mla, sparse_mla
from longstraw_backend.kernels.staging import STAGINGS, copy_over, here, staged
from tests.kernels.accuracy import poison_cuda_memory
from tests.kernels.attention_inputs import OWN, SHARED, Case, make_inputs, value_and_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "decode step": Case(3, 8, 2, 1, ((500, SHARED), (9, OWN)), 128),
    "one page": Case(1, 12, 2, 63, ((1027, SHARED),), 128),
    "many pages": Case(1, 12, 2, 300, ((2048, SHARED),) * 5 + ((77, SHARED),), 128),
    "rows": Case(2, 8, 2, 63, ((300, SHARED), (77, OWN), (1, OWN), (640, SHARED)), 64),
}
IMPLS = {"reference": torch.float32, "flash": torch.bfloat16, "cudnn": torch.bfloat16}
MIB = 1 << 20
SLACK = 4 * MIB
"""What the allocator may round up."""
each_staging = pytest.mark.parametrize("mode", STAGINGS)


def pinned(x: Tensor) -> Tensor:
    """The same numbers in pinned memory, cut from a buffer with three more tokens of NaN."""
    shape = (*x.shape[:-2], x.shape[-2] + 3, x.shape[-1])
    room = torch.full(shape, float("nan"), dtype=x.dtype, pin_memory=True)
    view = room[..., : x.shape[-2], :]
    view.copy_(x)
    return view


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def assert_same(found: Sequence[Tensor], run: Sequence[Tensor]) -> None:
    """The first result, the forward's, is bitwise that of the run on the device; gradients of fused
    kernels differ in their last bits between any two runs."""
    assert torch.equal(found[0], run[0])
    for a, b in zip(found, run, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("cycles", [0, 5_000_000], ids=["fast kernels", "slow kernels"])
@each_staging
def test_a_page_is_whole_while_it_is_used(mode: Any, cycles: int) -> None:
    pages = [(torch.full((8 * MIB,), float(i), pin_memory=True),) for i in range(8)]
    for _ in range(3):
        found = []
        for (x,) in staged(pages, device(), mode):
            if cycles:
                torch.cuda._sleep(cycles)
            found.append(torch.stack(x.aminmax()))
        expected = torch.arange(8.0)[:, None].expand(8, 2)
        assert torch.equal(torch.stack(found).cpu(), expected)


def test_pages_on_the_device_pass_between_staged_ones() -> None:
    host, there = torch.ones(MIB, pin_memory=True), torch.full((MIB,), 2.0, device="cuda")
    order = [host, there, host, host, there, there, host]
    found = []
    for (x,), given in zip(staged([(t,) for t in order], device()), order, strict=True):
        assert x.is_cuda and (x is given) == given.is_cuda
        found.append(x.mean())
    assert torch.stack(found).tolist() == [t[0].item() for t in order]


def test_memory_given_back_early_is_not_written_to() -> None:
    pages = [(torch.ones(32 * MIB, pin_memory=True),) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = staged(pages, device())
    next(held)
    del held  # the second page is on its way
    later = [torch.zeros(32 * MIB, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    assert not any(x.any() for x in later)


def test_what_the_device_wrote_to_pinned_memory_is_what_comes_back() -> None:
    """No wait in between, as in a capture: a chunk is written, the next one reads it."""
    page = torch.zeros(4, 1 << 20, 8, pin_memory=True)
    for i in range(1, 5):
        cut = page[:, : i << 18]
        torch.cuda._sleep(5_000_000)
        copy_over(cut, torch.full(cut.shape, float(i), device="cuda"))
        assert here(cut, device()).unique().tolist() == [i]
        torch.cuda._sleep(5_000_000)
        copy_over(cut, torch.full(cut.shape, i + 0.5, device="cuda"))
        for (x,) in staged([(cut,)] * 2, device()):
            assert x.unique().tolist() == [i + 0.5]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@each_staging
def test_attention_over_pinned_pages(mode: Any, shape: Case, impl: str) -> None:
    if impl == "cudnn" and choose_impl(device(), torch.bfloat16) != "cudnn":
        pytest.skip("cuDNN attention is chosen from compute capability 9.0 on")
    poison_cuda_memory()
    inputs = make_inputs(shape, IMPLS[impl], "cuda")
    attention = partial(segment_attention, scale=shape.scale, impl=impl, staging=mode)
    run = value_and_grads(attention, inputs)
    # Pages that belong to rows are a branch's: they stay on the device.
    pages = [Page(*map(pinned, p)) if p.k.shape[0] == 1 else p for p in inputs.pages]
    found = value_and_grads(attention, replace(inputs, pages=pages))
    assert_same(found, run)
    with torch.no_grad():
        assert torch.equal(attention(inputs.q, inputs.k, inputs.v, pages), run[0])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("page", [3000, 8192, 20000])
def test_selection_over_pinned_keys(page: int, dtype: torch.dtype) -> None:
    q, w = normal(100, 64, 128, dtype=dtype), normal(100, 64, dtype=torch.float32)
    keys = normal(20100, 128, dtype=dtype)
    old, own = keys[:20000].split(page), keys[20000:]
    where: dict[str, Any] = dict(start=20000, k=512, scale=128**-0.5)
    expected = index_topk(q, w, own, consecutive(old), **where)
    found = index_topk(q, w, own, consecutive(map(pinned, old)), **where)
    assert torch.equal(found, expected)


def sparse_inputs() -> tuple[list[Tensor], Tensor]:
    """Queries, latents of new and of resident tokens, and a selection with holes."""
    tensors = [normal(100, 16, 576), normal(100, 576), normal(9000, 576)]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(9001, generator=generator)[:512] for _ in range(100)]
    selection = torch.stack(rows).int()
    selection[::3, 400:] = -1
    return tensors, selection.cuda()


def test_sparse_attention_over_pinned_latents() -> None:
    (q, own, old), selection = sparse_inputs()
    leaves = [t.requires_grad_() for t in (q, own)]

    def run(pages: Sequence[Tensor]) -> list[Tensor]:
        spans = consecutive(pages)
        out = sparse_mla(*leaves, selection, spans, start=9000, scale=0.1, value_dim=512)
        grads = torch.autograd.grad(out.out.float().sum() + out.lse.sum(), leaves)
        return [out.out.detach(), out.lse.detach(), *grads]

    pages = old.split(4000)
    found = run([pinned(pages[0]), pages[1], pinned(pages[2])])
    first = run(pages)
    assert torch.equal(found[1], first[1])
    assert_same(found, first)


def test_cotangents_of_pinned_latents_lie_beside_them() -> None:
    (q, own, old), selection = sparse_inputs()

    def run(pages: list[Tensor]) -> list[Tensor]:
        sums = [torch.zeros(p.shape, device=p.device) for p in pages]
        where: dict[str, Any] = dict(start=9000, scale=0.1, value_dim=512, page_grads=sums)
        out = sparse_mla(q.requires_grad_(), own, selection, consecutive(pages), **where).out
        return [*torch.autograd.grad(out.float().sum(), q), *sums]

    expected = run(list(old.split(5000)))
    found = run([pinned(p) for p in old.split(5000)])
    assert [t.is_cuda for t in found] == [True, False, False]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cuda(), b, rtol=2**-7, atol=2**-7)


def test_dense_attention_over_pinned_latents() -> None:
    q, own, old = (normal(*s) for s in ((1, 40, 4, 96), (1, 40, 96), (1, 3000, 96)))
    pages = old.split(1000, dim=1)
    run = partial(dense_mla, q, own, scale=0.1, value_dim=64)
    assert torch.equal(run([pinned(p) for p in pages]), run(pages))


def extra_bytes(work: Callable[[], object]) -> int:
    """Peak of device memory above what is held before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Held:
    """New tokens and six pages of 32 MiB, on the device and in pinned memory."""

    def __init__(self) -> None:
        self.new = [normal(1, n, 64, 128).requires_grad_() for n in (8, 2, 2)]
        self.pages = [Page(*(normal(1, 2, 32768, 128) for _ in "kv")) for _ in range(6)]
        self.pinned = [Page(*(t.cpu().pin_memory() for t in page)) for page in self.pages]
        self.page_bytes = sum(t.nbytes for t in self.pages[0])

    def forward(self, pages: list[Page], mode: Any) -> Tensor:
        return segment_attention(*self.new, pages, scale=0.1, staging=mode)

    def extra(self, pages: list[Page], mode: Any) -> int:
        def work() -> None:
            torch.autograd.grad(self.forward(pages, mode).sum(), self.new)

        return extra_bytes(work)


def test_segments_take_the_room_of_two_pages_in_forward_and_backward() -> None:
    held = Held()
    held.extra(held.pages, "segments")  # workspaces of libraries stay
    there = held.extra(held.pages, "segments")
    for count in (3, 6):
        more = held.extra(held.pinned[:count], "segments") - there
        assert more <= 2 * held.page_bytes + SLACK


def test_segments_reserve_no_more_as_the_host_runs_ahead() -> None:
    held = Held()
    for _ in range(2):  # the second has all workspaces
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.no_grad():
            for _ in range(8):
                torch.cuda._sleep(20_000_000)
                held.forward(held.pinned, "segments")
        more = torch.cuda.memory_reserved() - before
    assert more <= 2 * held.page_bytes + 8 * SLACK


def test_a_layer_takes_the_room_of_all_pages() -> None:
    held = Held()
    held.extra(held.pages, "layer")
    there = held.extra(held.pages, "layer")
    more = held.extra(held.pinned, "layer") - there
    assert 5 * held.page_bytes <= more <= 6 * held.page_bytes + SLACK


@each_staging
def test_the_graph_keeps_nothing_that_was_staged(mode: Any) -> None:
    held = Held()
    held.forward(held.pages, mode)
    sizes = []
    for pages in (held.pages, held.pinned):
        before = torch.cuda.memory_allocated()
        out = held.forward(pages, mode)
        sizes.append(torch.cuda.memory_allocated() - before)
        del out
    assert abs(sizes[1] - sizes[0]) <= MIB // 4


def test_keys_come_in_blocks() -> None:
    q, w, own = normal(64, 64, 128), normal(64, 64), normal(64, 128)
    keys = normal(1 << 18, 128)  # 64 MiB
    on_host = keys.cpu().pin_memory()
    run = partial(index_topk, q, w, own, start=1 << 18, k=512, scale=0.1)
    run(consecutive([keys]))
    there = extra_bytes(lambda: run(consecutive([keys])))
    assert extra_bytes(lambda: run(consecutive([on_host]))) - there <= SLACK
