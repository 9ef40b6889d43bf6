"""Absorbed attention over latents against masked attention over all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span, consecutive
from longstraw_backend.kernels.sparse_mla import LatentAttention, dense_mla, sparse_mla
from longstraw_backend.kernels.sparse_mla import selected as blocking
from tests.kernels.accuracy import assert_as_accurate

HEADS, WIDTH, VALUE = 3, 24, 16
SCALE = 1.25 * WIDTH**-0.5


class Inputs(NamedTuple):
    """Queries [S, N, C], latents of all tokens [T, C], selection [S, K], cotangents."""

    q: Tensor
    latents: Tensor
    selection: Tensor
    dout: Tensor
    dlse: Tensor

    @property
    def start(self) -> int:
        return self.latents.shape[0] - self.q.shape[0]

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(t if t is self.selection else t.to(dtype) for t in self))


def make(tokens: int, resident: int, k: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """A random causal selection of up to k tokens for each query, ascending, -1 at the end."""
    g = torch.Generator().manual_seed(tokens + resident)
    shapes = (tokens, HEADS, WIDTH), (resident + tokens, WIDTH), (tokens, HEADS, VALUE)
    q, latents, dout = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    dlse = torch.randn(tokens, HEADS, generator=g, dtype=torch.float64)
    selection = torch.full((tokens, k), -1, dtype=torch.int32)
    for s in range(tokens):
        picked = torch.randperm(resident + s + 1, generator=g)[:k].sort().values
        selection[s, : len(picked)] = picked
    return Inputs(q, latents, selection, dout, dlse.to(torch.promote_types(dtype, torch.float32)))


def ours(
    q: Tensor,
    latents: Tensor,
    inputs: Inputs,
    cuts: tuple[int, ...] = (),
    grads: Tensor | None = None,
) -> LatentAttention:
    """Over pages of all but the last latents, whose cotangents are added to ``grads`` [T, C]."""
    places = [(a, b) for a, b in pairwise((0, *cuts, inputs.start)) if a < b]
    return sparse_mla(
        q,
        latents[inputs.start :],
        inputs.selection,
        consecutive([latents[a:b] for a, b in places]),
        start=inputs.start,
        scale=SCALE,
        value_dim=VALUE,
        page_grads=[None if grads is None else grads[a:b] for a, b in places],
    )


def masked(q: Tensor, latents: Tensor, inputs: Inputs, cuts: object = ()) -> LatentAttention:
    """Attention over all latents under a mask of the selection, in the inputs' dtype."""
    seen = torch.zeros(q.shape[0], latents.shape[0] + 1, dtype=torch.bool)
    seen.scatter_(1, inputs.selection.long() % (latents.shape[0] + 1), True)
    scores = torch.einsum("snc,tc->snt", q, latents) * SCALE
    scores = scores.masked_fill(~seen[:, None, :-1], float("-inf"))
    lse = scores.to(inputs.dlse.dtype).logsumexp(-1)
    return LatentAttention(scores.softmax(-1) @ latents[:, :VALUE], lse)


def value_and_grads(
    attention: Callable[..., LatentAttention], inputs: Inputs, cuts: tuple[int, ...] = ()
) -> list[Tensor]:
    """Output, log-sum-exp, dq and the cotangents of all latents, resident ones too."""
    q, latents = inputs.q.clone().requires_grad_(), inputs.latents.clone().requires_grad_()
    outside = torch.zeros_like(latents, dtype=inputs.dlse.dtype)
    options = {} if attention is masked else {"grads": outside}
    out = attention(q, latents, inputs, cuts, **options)
    dq, dlatents = torch.autograd.grad(out, (q, latents), (inputs.dout, inputs.dlse))
    return [out.out.detach(), out.lse.detach(), dq, dlatents + outside.to(dlatents.dtype)]


CASES = [(1, 0, 4), (1, 40, 8), (17, 0, 5), (17, 60, 8), (9, 3, 64)]
each_case = pytest.mark.parametrize(("tokens", "resident", "k"), CASES)


@each_case
def test_matches_masked_attention_in_float64(tokens: int, resident: int, k: int) -> None:
    inputs = make(tokens, resident, k)
    for a, b in zip(value_and_grads(ours, inputs), value_and_grads(masked, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_is_as_accurate_as_masked_attention(
    tokens: int, resident: int, k: int, dtype: torch.dtype
) -> None:
    inputs = make(tokens, resident, k, dtype)
    actual, plain = value_and_grads(ours, inputs), value_and_grads(masked, inputs)
    exact = value_and_grads(masked, inputs.to(torch.float64))
    assert_as_accurate(actual, plain, exact)


def test_gradients_pass_gradcheck() -> None:
    inputs = make(3, 4, 3)
    old, own = inputs.latents.split([4, 3])
    leaves = inputs.q.clone().requires_grad_(), own.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, c: tuple(ours(q, torch.cat([old, c]), inputs, (2,))), leaves
    )


def test_gradients_of_pages_are_added_to_what_is_there() -> None:
    inputs = make(17, 60, 8)
    *_, dlatents = value_and_grads(masked, inputs)
    sums = [torch.ones(60, WIDTH, dtype=torch.float64) for _ in range(2)]
    out = ours(inputs.q.requires_grad_(), inputs.latents, inputs, (25,), grads=sums[0])
    torch.autograd.backward(out, (inputs.dout, inputs.dlse))
    torch.testing.assert_close(sums[0] - sums[1], dlatents[:60], rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 500, 3000])
def test_blocks_of_queries_change_no_bit(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(17, 60, 8)
    whole = value_and_grads(ours, inputs)
    monkeypatch.setattr(blocking, "BLOCK_ELEMENTS", elements)
    blocked = value_and_grads(ours, inputs)
    for a, b in zip(blocked[:3], whole[:3], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(blocked[3], whole[3], rtol=0, atol=1e-12)  # sums in other order


@pytest.mark.parametrize("cuts", [(1,), (20, 21, 59), tuple(range(1, 60))])
def test_cuts_into_pages_change_no_bit(cuts: tuple[int, ...]) -> None:
    inputs = make(17, 60, 8)
    whole, cut = value_and_grads(ours, inputs), value_and_grads(ours, inputs, cuts)
    for a, b in zip(cut, whole, strict=True):
        assert torch.equal(a, b)


def test_constant_pages_receive_none_and_own_latents_theirs() -> None:
    inputs = make(17, 60, 8)
    *_, dlatents = value_and_grads(masked, inputs)
    page = inputs.latents[:60].clone()
    q, own = inputs.q.clone().requires_grad_(), inputs.latents[60:].clone().requires_grad_()
    where: dict[str, Any] = dict(start=60, scale=SCALE, value_dim=VALUE)
    out = sparse_mla(q, own, inputs.selection, [Span(0, page)], **where)
    torch.autograd.backward(out, (inputs.dout, inputs.dlse))
    assert page.grad is None
    torch.testing.assert_close(own.grad, dlatents[60:], rtol=0, atol=1e-12)


def test_query_without_tokens_gives_zero_and_no_gradient() -> None:
    inputs = make(5, 20, 4)
    inputs.selection[2] = -1
    out, lse, dq, dlatents = value_and_grads(ours, inputs)
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all() and (dq[2] == 0).all()
    assert out.isfinite().all() and dq.isfinite().all() and dlatents.isfinite().all()


def test_parts_of_owners_merge_to_the_whole() -> None:
    inputs = make(17, 60, 16)
    where: dict[str, Any] = dict(start=60, scale=SCALE, value_dim=VALUE)

    def merged(
        q: Tensor, latents: Tensor, inputs: Inputs, _: object, grads: Tensor
    ) -> LatentAttention:
        dealt, sums = consecutive(latents[:60].split(7)), grads[:60].split(7)
        own, nothing = latents[60:], torch.full_like(inputs.selection, -1)
        first = torch.where(inputs.selection < 60, inputs.selection, nothing)
        parts = [
            sparse_mla(q, own, picked, dealt[r::3], page_grads=sums[r::3], **where)
            for r, picked in enumerate((inputs.selection, first, first))
        ]
        lse = torch.stack([p.lse for p in parts])
        total = lse.logsumexp(0)
        return LatentAttention(
            sum(p.out * (p.lse - total).exp()[..., None] for p in parts),  # type: ignore[arg-type]
            total,
        )

    whole, parts = value_and_grads(ours, inputs), value_and_grads(merged, inputs)
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "resident"), [(1, 0), (1, 33), (17, 0), (17, 60)])
def test_dense_matches_selecting_everything(shared: bool, tokens: int, resident: int) -> None:
    both = [make(tokens, resident, tokens + resident) for _ in range(2)]
    both[1] = both[1]._replace(q=both[1].q * 0.5, latents=both[1].latents.clone())
    if not shared:
        both[1].latents[:resident] *= -1.0
    leaves = [torch.stack(t).requires_grad_() for t in ([i.q for i in both], _own(both))]
    pages = torch.stack([i.latents[:resident] for i in both])[: 1 if shared else 2]
    held = [page for page in pages.split(25, dim=1) if page.numel()]
    out = dense_mla(*leaves, held, scale=SCALE, value_dim=VALUE)
    grads = torch.autograd.grad(out, leaves, torch.stack([i.dout for i in both]))
    for row, inputs in enumerate(both):
        quiet = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
        expected, _, dq, dlatents = value_and_grads(masked, quiet)
        for a, b in zip(
            (out[row], grads[0][row], grads[1][row]),
            (expected, dq, dlatents[resident:]),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def _own(rows: list[Inputs]) -> list[Tensor]:
    return [i.latents[i.start :] for i in rows]


def test_rejects_what_does_not_fit() -> None:
    q, latents, selection, *_ = make(4, 20, 4)
    own, page = latents[20:], Span(0, latents[:20])
    where: dict[str, Any] = dict(start=20, scale=1.0, value_dim=VALUE)
    with pytest.raises(ValueError, match=r"q: expected \[S, N, C\]"):
        sparse_mla(q[0], own, selection, [page], **where)
    with pytest.raises(ValueError, match=r"latents: expected \[4, 24\]"):
        sparse_mla(q, own[:, 1:], selection, [page], **where)
    with pytest.raises(ValueError, match=r"selection: expected \[4, K\]"):
        sparse_mla(q, own, selection[:3], [page], **where)
    with pytest.raises(ValueError, match="selection: expected integers"):
        sparse_mla(q, own, selection.float(), [page], **where)
    with pytest.raises(ValueError, match=r"pages\[0\]: captured as torch.float32"):
        sparse_mla(q, own, selection, [Span(0, page.rows.float())], **where)
    with pytest.raises(ValueError, match="value_dim: expected 1 to 24"):
        sparse_mla(q, own, selection, [page], start=20, scale=1.0, value_dim=25)
