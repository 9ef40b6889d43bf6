"""flash-linear-attention's rule on CUDA, against the definition in float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from longstraw_backend.kernels.delta_rule import gated_delta_rule
from tests.kernels.accuracy import poison_cuda_memory
from tests.kernels.delta_rule_inputs import Inputs, by_definition, gradients, in_float32, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs fla-core"),
]
BFLOAT16 = 2.0**-8
"""Unit roundoff. The kernels keep what they mix in bfloat16, whatever the dtype of a result."""


def _on_gpu(tokens: int, rows: int = 1) -> Inputs:
    x = inputs(tokens, torch.bfloat16, rows=rows, m=2, n=6, k=128, v=128)
    return Inputs(*(t.cuda() for t in x))


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.fixture(autouse=True)
def _nan_in_unwritten_memory() -> None:
    poison_cuda_memory()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000])
def test_is_as_accurate_as_plain_torch(tokens: int) -> None:
    x = _on_gpu(tokens)
    exact = gradients(by_definition, Inputs(*(t.double() for t in x)))
    found = gradients(lambda x: gated_delta_rule(*x, impl="fla"), x)
    plain = gradients(in_float32, x)
    for place, (a, p, e) in enumerate(zip(found, plain, exact, strict=True)):
        assert a.dtype == p.dtype and a.isfinite().all(), f"result {place}"
        error, bound = _rms(a - e), 2 * (_rms(p - e) + BFLOAT16 * _rms(e))
        assert error <= bound, f"result {place}: error {error:.3e}, allowed {bound:.3e}"


@pytest.mark.parametrize("tokens", [1, 65, 1000])
def test_forward_is_bitwise_repeatable_with_and_without_autograd(tokens: int) -> None:
    x = _on_gpu(tokens)
    with torch.no_grad():
        scored = gated_delta_rule(*x)
    replayed = gated_delta_rule(*(t.detach().requires_grad_() for t in x))
    assert all(torch.equal(a, b) for a, b in zip(scored, replayed, strict=True))


def test_state_goes_on_from_block_to_block() -> None:
    x = _on_gpu(256, rows=2)
    whole = gated_delta_rule(*x)
    state, outputs = x.state, []
    for block in zip(*(t.split((64, 128, 1, 63), dim=1) for t in x[:5]), strict=True):
        output, state = gated_delta_rule(*block, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state, whole[1], atol=2e-2, rtol=2e-2)
