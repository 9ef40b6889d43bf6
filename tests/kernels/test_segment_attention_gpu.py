"""Attention over resident pages by torch's fused CUDA kernels, against attention in float32.

What a kernel may assume of its inputs and what it leaves unwritten differs between kernels, so
inputs are strided as in use, and memory that nobody wrote holds NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from longstraw_backend.kernels.segment_attention import choose_impl, segment_attention
from longstraw_backend.kernels.segment_attention.partial import CudaPartial
from tests.kernels.accuracy import assert_as_accurate, poison_cuda_memory
from tests.kernels.attention_inputs import (
    OWN,
    SHARED,
    Case,
    Inputs,
    make_inputs,
    plain_attention,
    torch_attention,
    value_and_grads,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "one token, no pages": Case(1, 8, 2, 1),
    "one token, page of one token": Case(1, 4, 4, 1, ((1, SHARED),)),
    "decode step": Case(3, 8, 2, 1, ((500, SHARED), (9, OWN))),
    "no pages": Case(1, 8, 2, 63),
    "grouped heads": Case(1, 12, 2, 63, ((1, SHARED), (64, SHARED), (1027, SHARED))),
    "rows": Case(2, 8, 2, 63, ((300, SHARED), (77, OWN), (1, OWN))),
    "long": Case(1, 8, 2, 1000, ((2048, SHARED), (1531, SHARED), (3, SHARED))),
}
KERNELS = ("flash", "cudnn")
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
each_kernel = pytest.mark.parametrize("impl", KERNELS)
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


@pytest.fixture(autouse=True)
def _nan_in_unwritten_memory() -> None:
    poison_cuda_memory()


@pytest.fixture(autouse=True)
def _kernel_runs_here(request: pytest.FixtureRequest) -> None:
    chosen = choose_impl(torch.device("cuda"), torch.bfloat16)
    if request.node.callspec.params.get("impl") == "cudnn" and chosen != "cudnn":
        pytest.skip("cuDNN attention is chosen from compute capability 9.0 on")


def ours(case: Case, impl: str) -> partial[torch.Tensor]:
    return partial(segment_attention, scale=case.scale, impl=impl)


def make(shape: Case, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Case, Inputs]:
    case = replace(shape, head_dim=head_dim)
    return case, make_inputs(case, dtype, "cuda")


@each_shape
@each_kernel
@each_head_dim
def test_is_as_accurate_as_one_call_over_all_keys(shape: Case, impl: str, head_dim: int) -> None:
    case, inputs = make(shape, head_dim)
    actual = value_and_grads(ours(case, impl), inputs)
    plain = value_and_grads(partial(torch_attention, scale=case.scale), inputs)
    exact = partial(plain_attention, scale=case.scale)
    assert_as_accurate(actual, plain, value_and_grads(exact, inputs.to(torch.float64)))


@each_shape
@each_kernel
@each_head_dim
def test_forward_is_bitwise_repeatable_with_and_without_grad(
    shape: Case, impl: str, head_dim: int
) -> None:
    case, inputs = make(shape, head_dim)
    tensors = inputs.q, inputs.k, inputs.v
    with torch.no_grad():
        scored = ours(case, impl)(*tensors, inputs.pages)
    poison_cuda_memory()
    replayed = ours(case, impl)(*(t.detach().requires_grad_() for t in tensors), inputs.pages)
    assert torch.equal(scored, replayed)


@each_kernel
def test_one_token_without_pages_returns_its_value(impl: str) -> None:
    case, inputs = make(Case(2, 8, 2, 1), 128)
    out = ours(case, impl)(inputs.q, inputs.k, inputs.v, [])
    assert torch.equal(out, inputs.v.repeat_interleave(4, dim=1))


@each_kernel
def test_cotangent_may_be_expanded(impl: str) -> None:
    # What `out.sum().backward()` passes: one number, all strides 0.
    case, inputs = make(Case(1, 8, 2, 63, ((70, SHARED),)), 64)
    expanded = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(inputs.q.shape)
    grads = value_and_grads(ours(case, impl), replace(inputs, dout=expanded))
    expected = value_and_grads(ours(case, impl), replace(inputs, dout=expanded.contiguous()))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


@each_kernel
@pytest.mark.parametrize("pages", [(), ((70, SHARED),), ((70, OWN), (5, SHARED))])
def test_kernels_get_a_contiguous_log_sum_exp(
    impl: str, pages: tuple[tuple[int, bool], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, inputs = make(Case(2, 8, 2, 63, pages), 64)
    seen: list[bool] = []
    backward = CudaPartial.backward

    def spy(self: CudaPartial, *args: Any) -> Any:
        seen.append(args[5].is_contiguous())
        return backward(self, *args)

    monkeypatch.setattr(CudaPartial, "backward", spy)
    value_and_grads(ours(case, impl), inputs)
    assert seen == [True] * (1 + len(pages))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_runs_the_reference(head_dim: int) -> None:
    case, inputs = make(SHAPES["rows"], head_dim, torch.float32)
    default = partial(segment_attention, scale=case.scale)
    expected = value_and_grads(ours(case, "reference"), inputs)
    for a, b in zip(value_and_grads(default, inputs), expected, strict=True):
        assert torch.equal(a, b)
