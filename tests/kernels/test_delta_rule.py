"""The gated delta rule: against its definition, over any split, with all its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw_backend.kernels.delta_rule import choose_impl, gated_delta_rule
from longstraw_backend.kernels.delta_rule.choice import check_fla
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.delta_rule_inputs import Inputs, by_definition, gradients, in_float32, inputs


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_matches_the_definition(tokens: int) -> None:
    x = inputs(tokens)
    results = zip(
        gradients(lambda x: gated_delta_rule(*x), x), gradients(by_definition, x), strict=True
    )
    for name, (found, expected) in zip(("output", "final", *Inputs._fields), results, strict=True):
        assert found.dtype == torch.float64
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("sizes", [{"m": 1, "n": 1}, {"m": 4}, {"m": 1, "n": 6}], ids=str)
def test_groups_of_value_heads(sizes: dict[str, int]) -> None:
    x = inputs(20, **sizes)
    for found, expected in zip(gated_delta_rule(*x), by_definition(x), strict=True):
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cuts", [(70, 50, 30), (3, 1, 66, 1, 79), (64, 64, 22), (1,) * 150])
def test_splits_do_not_matter(cuts: tuple[int, ...]) -> None:
    x = inputs(150)

    def in_blocks(x: Inputs) -> tuple[Tensor, Tensor]:
        state, outputs = x.state, []
        for block in zip(*(t.split(cuts, dim=1) for t in x[:5]), strict=True):
            output, state = gated_delta_rule(*block, state)
            outputs.append(output)
        return torch.cat(outputs, 1), state

    whole = gradients(lambda x: gated_delta_rule(*x), x)
    for found, expected in zip(gradients(in_blocks, x), whole, strict=True):
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_gradcheck_over_a_chunk_border() -> None:
    x = inputs(66, rows=1, m=1, n=2, k=2, v=2)
    leaves = [t.requires_grad_() for t in x]
    assert torch.autograd.gradcheck(gated_delta_rule, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_as_accurate_as_the_definition(dtype: torch.dtype) -> None:
    x = inputs(130, dtype)
    exact = gradients(by_definition, Inputs(*(t.double() for t in x)))
    found = gradients(lambda x: gated_delta_rule(*x), x)
    assert_as_accurate(found, gradients(in_float32, x), exact, conditioning=4)


def test_strong_decay_neither_overflows_nor_loses_gradients() -> None:
    x = inputs(100, torch.float32)
    x = x._replace(g=x.g * 1000)
    assert all(t.isfinite().all() for t in gradients(lambda x: gated_delta_rule(*x), x))


def test_output_is_the_same_bits_without_a_final_state() -> None:
    x = inputs(70, torch.float32)
    output, nothing = gated_delta_rule(*x, final_state=False)
    assert nothing is None and torch.equal(output, gated_delta_rule(*x)[0])


def test_the_state_given_is_left_alone() -> None:
    x = inputs(70)
    before = x.state.clone()
    output, final = gated_delta_rule(*x)
    assert torch.equal(x.state, before)
    assert final.untyped_storage().data_ptr() != x.state.untyped_storage().data_ptr()


def test_rows_of_one_state_are_rows_of_their_own() -> None:
    x = inputs(10, rows=3)
    shared = x._replace(state=x.state[:1].expand(3, -1, -1, -1))
    output, final = gated_delta_rule(*shared)
    for row in range(3):
        alone = Inputs(*(t[row : row + 1] for t in shared))
        for found, expected in zip((output, final), gated_delta_rule(*alone), strict=True):
            assert torch.allclose(found[row : row + 1], expected, rtol=0, atol=1e-14)


def test_autocast_leaves_the_state_in_float32() -> None:
    x = inputs(70, torch.bfloat16)
    expected = gated_delta_rule(*x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_delta_rule(*x)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 0, 2, 5)}, "T >= 1"),
        ({"k": torch.zeros(2, 8, 2, 4)}, r"k: expected \[2, 8, 2, 5\]"),
        ({"v": torch.zeros(2, 8, 3, 3)}, "3 value heads are no multiple of 2 key heads"),
        ({"g": torch.zeros(2, 8, 2)}, r"g: expected \[2, 8, 4\]"),
        ({"beta": torch.zeros(2, 7, 4)}, r"beta: expected \[2, 8, 4\]"),
        ({"state": torch.zeros(1, 4, 5, 3)}, r"state: expected \[2, 4, 5, 3\]"),
        ({"state": torch.zeros(2, 4, 5, 3).double()}, "state: expected torch.float32"),
        ({"v": torch.zeros(2, 8, 4, 3).bfloat16()}, "v: expected torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_bad_input_is_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*inputs(8, torch.float32)._replace(**change))


def test_unknown_impl_is_named() -> None:
    with pytest.raises(ValueError, match="impl.*reference, fla.*'triton'"):
        gated_delta_rule(*inputs(8), impl="triton")  # type: ignore[arg-type]


def test_one_impl_for_a_device_and_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert {choose_impl(cpu, t) for t in (torch.bfloat16, torch.float64)} == {"reference"}
    assert choose_impl(cuda, torch.bfloat16) == "fla"
    assert choose_impl(cuda, torch.float32) == "reference"


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("capability", "triton", "packages", "message"),
    [
        (AMPERE, "3.6.0", set(), "flash-linear-attention is needed"),
        (HOPPER, "3.6.0", {"fla"}, "wrong gradients"),
        (HOPPER, "3.4.0", {"fla"}, "wrong gradients"),
        (HOPPER, "3.7.1", {"fla"}, None),
        (HOPPER, "3.3.1", {"fla"}, None),
        (HOPPER, "3.6.0", {"fla", "tilelang"}, None),
        (HOPPER, "3.6.0", {"fla", "flash_qla"}, None),
        (AMPERE, "3.6.0", {"fla"}, None),
    ],
)
def test_known_wrong_combinations_are_refused(
    capability: tuple[int, int], triton: str, packages: set[str], message: str | None
) -> None:
    if message is None:
        check_fla(capability, triton, packages)
        return
    with pytest.raises(RuntimeError, match=message):
        check_fla(capability, triton, packages)
