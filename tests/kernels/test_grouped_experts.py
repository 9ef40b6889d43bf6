"""Experts over grouped rows against one expert at a time, row by row."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from longstraw_backend.kernels.grouped_experts import Impl, choose_impl, grouped_experts
from tests.kernels.accuracy import assert_as_accurate

HIDDEN, WIDTH = 16, 24


class Inputs(NamedTuple):
    """Rows [S, H], their experts [S], both weights, the cotangent [S, H]."""

    x: Tensor
    expert: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(t if t is self.expert else t.to(dtype) for t in self))

    def offsets(self) -> Tensor:
        counts = torch.bincount(self.expert, minlength=len(self.gate_up)).tolist()
        return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=self.x.device)


def make(counts: list[int], dtype: torch.dtype, device: str = "cpu", scale: int = 1) -> Inputs:
    """``counts[e]`` rows of expert e; widths multiplied by ``scale``."""
    g = torch.Generator().manual_seed(sum(counts))
    rows, experts, hidden, width = sum(counts), len(counts), HIDDEN * scale, WIDTH * scale
    shapes = (rows, hidden), (experts, 2 * width, hidden), (experts, hidden, width), (rows, hidden)
    x, gate_up, down, dy = (
        (torch.randn(*s, generator=g, dtype=torch.float64) * s[-1] ** -0.5).to(device, dtype)
        for s in shapes
    )
    expert = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    return Inputs(x, expert.to(device), gate_up, down, dy)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def plain(x: Tensor, gate_up: Tensor, down: Tensor, inputs: Inputs) -> Tensor:
    hidden = gated(torch.einsum("sh,sfh->sf", x, gate_up[inputs.expert]))
    return torch.einsum("si,shi->sh", hidden, down[inputs.expert])


def ours(
    x: Tensor, gate_up: Tensor, down: Tensor, inputs: Inputs, impl: Impl | None = None
) -> Tensor:
    return grouped_experts(x, inputs.offsets(), gate_up, down, gate=gated, impl=impl)


def value_and_grads(function: Any, inputs: Inputs, *args: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.gate_up, inputs.down)]
    out = function(*leaves, inputs, *args)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dy)]


COUNTS = [[3, 1, 7], [0, 5, 0, 2], [0, 0, 9], [4], [0, 0, 0]]
each_load = pytest.mark.parametrize("counts", COUNTS, ids=str)
needs_grouped_mm = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="needs a torch with grouped_mm"
)


@each_load
def test_reference_matches_row_by_row_in_float64(counts: list[int]) -> None:
    inputs = make(counts, torch.float64)
    actual, expected = value_and_grads(ours, inputs, "reference"), value_and_grads(plain, inputs)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@needs_grouped_mm
@each_load
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_grouped_mm_is_as_accurate_as_row_by_row(counts: list[int], dtype: torch.dtype) -> None:
    inputs = make(counts, dtype)
    actual, other = value_and_grads(ours, inputs, "grouped_mm"), value_and_grads(plain, inputs)
    exact = value_and_grads(plain, inputs.to(torch.float64))
    if sum(counts):
        assert_as_accurate(actual, other, exact)
    else:
        assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))


def test_gradients_pass_gradcheck() -> None:
    inputs = make([2, 0, 1], torch.float64)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.gate_up, inputs.down)]
    assert torch.autograd.gradcheck(lambda *args: ours(*args, inputs), leaves)


@needs_grouped_mm
@pytest.mark.parametrize("impl", ["reference", "grouped_mm"])
def test_frozen_weights_and_expanded_cotangents(impl: Impl) -> None:
    inputs = make([3, 0, 4], torch.float32)
    (want,) = torch.autograd.grad(
        plain(x := inputs.x.clone().requires_grad_(), *inputs[2:4], inputs).sum(), x
    )
    got_x = inputs.x.clone().requires_grad_()
    ours(got_x, *inputs[2:4], inputs, impl).sum().backward()
    torch.testing.assert_close(got_x.grad, want)
    assert inputs.gate_up.grad is None


def test_graph_changes_no_bit() -> None:
    inputs = make([3, 1, 7], torch.float32)
    with torch.no_grad():
        scored = ours(inputs.x, inputs.gate_up, inputs.down, inputs)
    assert torch.equal(scored, value_and_grads(ours, inputs)[0])


def test_cpu_and_wide_dtypes_take_the_reference() -> None:
    assert choose_impl(torch.device("cpu"), torch.bfloat16) == "reference"
    assert choose_impl(torch.device("cuda"), torch.float32) == "reference"


def test_rejects_what_does_not_fit() -> None:
    x, _, gate_up, down, _ = inputs = make([3, 1], torch.float32)
    offsets = inputs.offsets()
    with pytest.raises(ValueError, match=r"x, gate_up: expected \[S, H\]"):
        grouped_experts(x[0], offsets, gate_up, down, gate=gated)
    with pytest.raises(ValueError, match=r"gate_up: expected \[2, 48, 16\]"):
        grouped_experts(x, offsets, gate_up[..., :12], down, gate=gated)
    with pytest.raises(ValueError, match=r"down: expected \[2, 16, 24\]"):
        grouped_experts(x, offsets, gate_up, down.mT, gate=gated)
    with pytest.raises(ValueError, match="down: expected torch.float32"):
        grouped_experts(x, offsets, gate_up, down.double(), gate=gated)
    with pytest.raises(ValueError, match="offsets: expected torch.int32"):
        grouped_experts(x, offsets.long(), gate_up, down, gate=gated)
    with pytest.raises(ValueError, match="offsets: expected ascending ends of 4 rows"):
        grouped_experts(x, offsets - 1, gate_up, down, gate=gated)
    with pytest.raises(ValueError, match="impl: expected one of"):
        grouped_experts(x, offsets, gate_up, down, gate=gated, impl="cutlass")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_load
def test_cuda_is_as_accurate_as_row_by_row(counts: list[int]) -> None:
    inputs = make([37 * c for c in counts], torch.bfloat16, "cuda", scale=8)
    actual, other = value_and_grads(ours, inputs), value_and_grads(plain, inputs)
    exact = value_and_grads(plain, inputs.to(torch.float64))
    if sum(counts):
        assert_as_accurate(actual, other, exact)
    else:
        assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))
