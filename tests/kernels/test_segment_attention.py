"""Attention over resident pages on the CPU, against attention over all keys at once."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from longstraw_backend.kernels.segment_attention import Page, choose_impl, segment_attention
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.attention_inputs import (
    OWN,
    SHARED,
    Case,
    Inputs,
    make_inputs,
    plain_attention,
    value_and_grads,
)

CASES = {
    "one token, page of one token": Case(1, 4, 4, 1, ((1, SHARED),)),
    "one token, no pages": Case(2, 4, 2, 1),
    "no pages": Case(1, 4, 2, 63),
    "grouped heads": Case(1, 6, 2, 63, ((5, SHARED), (64, SHARED))),
    "one key/value head": Case(1, 4, 1, 200, ((130, SHARED),)),
    "rows share pages": Case(3, 4, 2, 63, ((7, SHARED), (1, SHARED))),
    "rows own pages": Case(2, 4, 2, 63, ((7, OWN), (70, OWN))),
    "shared and own pages": Case(2, 6, 2, 200, ((33, SHARED), (1, OWN), (1, SHARED), (7, OWN))),
    "decode step": Case(3, 4, 2, 1, ((40, SHARED), (3, OWN))),
}
IMPLS = ("reference", "cpu")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_impl = pytest.mark.parametrize("impl", IMPLS)


def both(case: Case, inputs: Inputs, impl: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ours = partial(segment_attention, scale=case.scale, impl=impl)
    return (
        value_and_grads(ours, inputs),
        value_and_grads(partial(plain_attention, scale=case.scale), inputs),
    )


@each_case
@each_impl
def test_matches_plain_attention_in_float64(case: Case, impl: str) -> None:
    ours, plain = both(case, make_inputs(case, torch.float64), impl)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@each_case
@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_is_as_accurate_as_plain_attention(case: Case, impl: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    ours, plain = both(case, inputs, impl)
    _, exact = both(case, inputs.to(torch.float64), impl)
    assert_as_accurate(ours, plain, exact)


@each_impl
@pytest.mark.parametrize("cuts", [(0, 60), (0, 1, 60), (0, 20, 21, 47, 60), tuple(range(61))])
def test_any_split_into_segments_equals_one_call(impl: str, cuts: tuple[int, ...]) -> None:
    case = Case(2, 4, 2, 17, ((60, SHARED),))
    inputs = make_inputs(case, torch.float64)
    (page,) = inputs.pages
    pages = [Page(page.k[:, :, a:b], page.v[:, :, a:b]) for a, b in pairwise(cuts)]
    attention = partial(segment_attention, scale=case.scale, impl=impl)
    whole = value_and_grads(attention, inputs)
    split = value_and_grads(attention, Inputs(inputs.q, inputs.k, inputs.v, pages, inputs.dout))
    for a, b in zip(split, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@each_impl
def test_tokens_in_chunks_equal_one_call(impl: str) -> None:
    case = Case(1, 4, 2, 63, ((9, SHARED),))
    inputs = make_inputs(case, torch.float64)
    attention = partial(segment_attention, scale=case.scale, impl=impl)
    whole = attention(inputs.q, inputs.k, inputs.v, inputs.pages)
    pages = list(inputs.pages)
    for q, k, v, expected in zip(
        *(t.split(20, dim=2) for t in (inputs.q, inputs.k, inputs.v, whole)), strict=True
    ):
        torch.testing.assert_close(attention(q, k, v, pages), expected, rtol=0, atol=1e-10)
        pages.append(Page(k, v))


@each_impl
def test_pages_get_no_gradient(impl: str) -> None:
    case = Case(2, 4, 2, 5, ((3, SHARED), (4, OWN)))
    inputs = make_inputs(case, torch.float64)
    pages = [Page(*(t.clone().requires_grad_() for t in page)) for page in inputs.pages]
    q = inputs.q.requires_grad_()
    segment_attention(q, inputs.k, inputs.v, pages, scale=case.scale, impl=impl).sum().backward()
    assert q.grad is not None
    assert all(t.grad is None for page in pages for t in page)


@each_impl
def test_gradients_match_finite_differences(impl: str) -> None:
    case = Case(2, 4, 2, 3, ((2, SHARED), (3, OWN)), head_dim=4)
    inputs = make_inputs(case, torch.float64)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    attention = partial(segment_attention, pages=inputs.pages, scale=case.scale, impl=impl)
    assert torch.autograd.gradcheck(attention, leaves)


@each_case
@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forward_is_bitwise_the_same_with_and_without_grad(
    case: Case, impl: str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype)
    attention = partial(segment_attention, scale=case.scale, impl=impl)
    with torch.no_grad():
        scored = attention(inputs.q, inputs.k, inputs.v, inputs.pages)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    assert torch.equal(scored, attention(*leaves, inputs.pages))


def test_only_the_inputs_that_need_gradients_get_them() -> None:
    case = Case(1, 4, 2, 5, ((3, SHARED),))
    inputs = make_inputs(case, torch.float64)
    q = inputs.q.requires_grad_()
    segment_attention(q, inputs.k, inputs.v, inputs.pages, scale=case.scale).sum().backward()
    assert q.grad is not None and inputs.k.grad is None and inputs.v.grad is None


def test_the_kernel_depends_on_device_and_dtype_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert choose_impl(torch.device("cpu"), dtype) == "cpu"
    assert choose_impl(torch.device("cuda"), torch.float32) == "reference"
    assert choose_impl(torch.device("meta"), torch.bfloat16) == "reference"


def q_k_v(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = make_inputs(Case(2, 4, 2, 5), torch.float32)
    return {"q_BNTH": inputs.q, "k_BKTH": inputs.k, "v_BKTH": inputs.v} | changes


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k_BKTH": zeros(2, 2, 6, 16)}, "k, v: expected [2, K, 5, 16]"),
        ({"v_BKTH": zeros(2, 1, 5, 16)}, "got (2, 2, 5, 16) and (2, 1, 5, 16)"),
        ({"k_BKTH": zeros(1, 2, 5, 16), "v_BKTH": zeros(1, 2, 5, 16)}, "k, v: expected [2, K, 5"),
        (
            {"k_BKTH": zeros(2, 3, 5, 16), "v_BKTH": zeros(2, 3, 5, 16)},
            "4 query heads are no multiple of 3",
        ),
        ({"q_BNTH": zeros(4, 5, 16)}, "q: expected [B, N, T, H] with T >= 1, got (4, 5, 16)"),
        ({n: zeros(2, 2, 0, 16) for n in ("q_BNTH", "k_BKTH", "v_BKTH")}, "with T >= 1, got (2, 2"),
        ({"k_BKTH": zeros(2, 2, 5, 16, dtype=torch.bfloat16)}, "got torch.bfloat16 on cpu and"),
        ({"v_BKTH": zeros(2, 2, 5, 16, device="meta")}, "and torch.float32 on meta"),
    ],
)
def test_rejects_new_tokens_that_do_not_fit(changes: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ValueError) as error:
        segment_attention(**q_k_v(**changes), pages=[], scale=1.0)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (Page(zeros(3, 2, 4, 16), zeros(3, 2, 4, 16)), "expected k, v of [1 or 2, 2, S, 16]"),
        (Page(zeros(1, 4, 4, 16), zeros(1, 4, 4, 16)), "got (1, 4, 4, 16) and (1, 4, 4, 16)"),
        (Page(zeros(1, 2, 4, 8), zeros(1, 2, 4, 8)), "expected k, v of"),
        (Page(zeros(2, 2, 16), zeros(2, 2, 16)), "expected k, v of"),
        (Page(zeros(1, 2, 0, 16), zeros(1, 2, 0, 16)), "expected k, v of"),
        (
            Page(zeros(1, 2, 4, 16), zeros(1, 2, 4, 16, dtype=torch.float64)),
            "captured as torch.float32 on cpu",
        ),
        (Page(zeros(1, 2, 4, 16), zeros(1, 2, 3, 16)), "expected k, v of"),
        (
            Page(*(zeros(1, 2, 4, 16, dtype=torch.bfloat16) for _ in range(2))),
            "captured as torch.bfloat16 on cpu, queries are torch.float32 on cpu",
        ),
        (
            Page(*(zeros(1, 2, 4, 16, device="meta") for _ in range(2))),
            "captured as torch.float32 on meta",
        ),
    ],
)
def test_rejects_a_page_that_does_not_fit(page: Page, text: str) -> None:
    good = Page(zeros(1, 2, 4, 16), zeros(1, 2, 4, 16))
    with pytest.raises(ValueError) as error:
        segment_attention(**q_k_v(), pages=[good, page], scale=1.0)
    assert str(error.value).startswith("pages[1]: ") and text in str(error.value)


def test_rejects_an_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="impl: expected one of reference, cpu, flash, cudnn"):
        segment_attention(**q_k_v(), pages=[], scale=1.0, impl="triton")  # type: ignore[arg-type]
